"""Loads the model of a command, with progress bars where somebody watches."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.load_options import DeviceOptions, LoadOptions
from torchax_serve.cli.shared.terminal import hidden_keys, may_style, passing_note


def run_as_follower(name: str | None, options: DeviceOptions) -> bool:
    """Lends this host's devices to the leader, if it is a follower, and says whether it was; ends with the leader."""
    hosts = options.hosts()
    if hosts is None or hosts.is_leader:
        return False
    with passing_note("starting torch and jax ..."):
        from torchax_serve import follow
    _keep_stdout_for_answers()
    options.show_details()
    follow(name, **options.serve_kwargs())
    return True


def _keep_stdout_for_answers() -> None:
    """Sends what libraries print to stderr: Gloo, which connects CPU devices of several hosts, reports on stdout."""
    sys.stdout.flush()
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(answers, "w", encoding=sys.stdout.encoding, buffering=1)


@contextlib.contextmanager
def loaded_model(
    name: str | None, options: LoadOptions, *, max_num_seqs: int | None = None, starts_chat: bool = False
) -> Iterator[Any]:
    """The model that `name` leads to (None: the embedded one), closed at the end.

    Args:
        name: as `torchax_serve.serve` takes it.
        options: of the command.
        max_num_seqs: requests that run at once, for which the cache is laid out; None for those of a server.
        starts_chat: whether a chat template will be rendered, which needs a process of its own.

    Raises:
        TorchaxServeError: whatever `torchax_serve.serve` has to say.
        KeyboardInterrupt: Ctrl-C while it loads.
    """
    with prompt_interrupts(leave_at=1), hidden_keys():
        with passing_note("starting torch and jax ..."):
            from model_adapters.loading.progress import RichProgress, SilentProgress
            from torchax_serve import EngineOptions, serve

        if starts_chat:
            from torchax_serve.text.template_renderer import shared_renderer

            shared_renderer().start()  # beside the loading
        if isinstance(options, DeviceOptions) and options.hosts() is not None:
            _keep_stdout_for_answers()
        options.show_details()
        progress = RichProgress() if may_style(sys.stderr) else SilentProgress()
        engine = None if max_num_seqs is None else EngineOptions(max_num_seqs=max_num_seqs)
        model = serve(name, progress=progress, engine=engine, **options.serve_kwargs())
    with contextlib.closing(model):
        yield model
