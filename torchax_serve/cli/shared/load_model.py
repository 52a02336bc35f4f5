"""Loads the model of a command, with progress bars at a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.load_options import DeviceOptions, LoadOptions
from torchax_serve.cli.shared.model_name import may_have_template
from torchax_serve.cli.shared.terminal import hidden_keys, may_style, passing_note, print_note

if TYPE_CHECKING:
    from torchax_serve import EngineOptions


def run_as_follower(name: str | None, options: DeviceOptions) -> bool:
    """Runs this host as a follower until the leader ends; returns False if the host is not one."""
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
    """Redirects output of libraries to stderr.

    Gloo, which connects CPU devices of several hosts, writes to stdout.
    """
    sys.stdout.flush()
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(answers, "w", encoding=sys.stdout.encoding, buffering=1)


def end_if_explained(name: str | None, options: LoadOptions) -> None:
    """Prints the effect of ``--quantization`` and ends the command if ``--explain`` is set.

    The effect is shown for each weight of model `name`.

    Raises:
        InvalidArgumentError: ``--explain`` without ``--quantization``.
        typer.Exit: after printing.
    """
    if not options.explain:
        return
    if options.quantization is None:
        raise InvalidArgumentError("--explain: expected --quantization with it, got none; add a preset or a file")
    with passing_note("starting torch and jax ..."):
        from model_adapters.loading.quantization_plan import explain
    print("\n".join(explain(name, options.quantization, requantize=options.requantize, **options.kwargs())))
    raise typer.Exit


@contextlib.contextmanager
def loaded_model(
    name: str | None,
    options: LoadOptions,
    *,
    engine: Callable[[], EngineOptions | None] | None = None,
    starts_chat: bool = False,
    packs_weights: bool = True,
) -> Iterator[Any]:
    """Yields the model `name` (None: the embedded one), and closes it.

    Args:
        name: Name as `torchax_serve.serve` takes it.
        options: Options of the command.
        engine: makes the options of the engine, once they can be imported; None: those of a server. An error where a
            bundle has other sizes.
        starts_chat: whether a chat template will be rendered, which needs a process of its own.
        packs_weights: whether bfloat16 weights are compressed for this processor.

    Raises:
        TorchaxServeError: The model cannot be served.
        KeyboardInterrupt: Ctrl-C while it loads.
    """
    with prompt_interrupts(leave_at=1), hidden_keys():
        end_if_explained(name, options)
        if starts_chat and may_have_template(name):
            from torchax_serve.text.template_renderer import shared_renderer

            shared_renderer().start()  # while all else is imported
        with passing_note("starting jax ..."):
            from model_adapters.loading.progress import RichProgress, SilentProgress
            from torchax_serve.entrypoints.serve import serve_without_pipelines

        if isinstance(options, DeviceOptions) and options.hosts() is not None:
            _keep_stdout_for_answers()
        options.show_details()
        progress = RichProgress() if may_style(sys.stderr) else SilentProgress()
        made = None if engine is None else engine()
        given = {"progress": progress, "engine": made, "pack_weights": packs_weights, **options.serve_kwargs()}
        model = serve_without_pipelines(name, **given)
        if model.load_report.quantization:
            print_note(model.load_report.quantization)
    with contextlib.closing(model):
        yield model
