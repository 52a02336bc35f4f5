"""``torchax-serve pull``: downloads a model, so that later commands need no network."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError, ModelNotFoundError
from model_adapters.loading.model_source import parse_name
from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.downloads import CacheDir, size_of
from torchax_serve.cli.shared.model_name import complete_model
from torchax_serve.cli.shared.terminal import hidden_keys, may_style, passing_note, print_note

if TYPE_CHECKING:
    from model_adapters.loading.model_source import ModelSource


Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        "--hf-token",
        envvar="HF_TOKEN",
        show_default=False,
        help="Hub token for gated and private models; better given by the variable than on the command line.",
    ),
]


def pull(
    model: Annotated[str, typer.Argument(help="Short name or hub id.", autocompletion=complete_model)],
    revision: Annotated[
        str | None, typer.Option("--revision", show_default=False, help="Branch, tag or commit; main without it.")
    ] = None,
    token: Token = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Take weights in pickle files where there are no safetensors.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Also take the Python code that comes with the model.")
    ] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Download a model of the hub: the files that this program reads, and no others.

    What is there already is not fetched again, and a download that was interrupted goes on where it ended.

    torchax-serve pull qwen3-0.6b
    """
    source = parse_name(model, revision)
    if not isinstance(source, str):
        raise InvalidArgumentError(
            f"MODEL: expected a short name or a hub id, got {model}, which is on this machine already; nothing to do"
        )
    with prompt_interrupts(leave_at=1), hidden_keys():
        with passing_note("starting ..."):
            from huggingface_hub import constants

            if constants.is_offline_mode():
                raise ModelNotFoundError(
                    "pull: expected the network, and HF_HUB_OFFLINE switches it off; unset the variable"
                )
        found = _download(
            model,
            revision=revision,
            token=token or None,
            allow_pickle=allow_pickle,
            with_code=trust_remote_code,
            cache_dir=cache_dir,
        )
    if found.download_bytes:
        print_note(f"{size_of(found.download_bytes)} in {found.download_s:.1f} s")
    else:
        print_note("nothing to download: all of it is here")
    print(found.path)


def _download(model: str, **options: Any) -> ModelSource:
    """Downloads the files that the loader reads of `model` into the hub's cache."""
    from model_adapters.loading.model_source import resolve
    from model_adapters.loading.progress import RichProgress, SilentProgress

    progress = RichProgress() if may_style(sys.stderr) else SilentProgress()
    return resolve(model, progress=progress, local_files_only=False, **options)


COMMAND = Command("pull", pull, position=80, examples=(("pull qwen3-0.6b", "download a model; rm deletes it"),))
