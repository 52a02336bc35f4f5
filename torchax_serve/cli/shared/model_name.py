"""Checks and completes MODEL of a command line before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.bundle_folder import holds_module
from model_adapters.loading.hub_cache import downloaded
from model_adapters.loading.model_source import ModelSource, bundle_folder, parse_name
from model_adapters.loading.short_names import SHORT_NAMES
from torchax_serve.validation.extras import require_package
from torchax_serve.validation.library_objects import is_cached_pipeline, is_pipeline_folder


def check_model(
    name: str | None, revision: str | None = None, *, with_weights: bool = True, takes_pipelines: bool = False
) -> None:
    """Raises an error unless `name` is a model on this machine or has the form of a hub id.

    None is the embedded model.

    Args:
        name: Name on the command line.
        revision: Revision on the command line.
        with_weights: Whether a configuration without weights is refused.
        takes_pipelines: Whether it may be a pipeline of diffusers.

    Raises:
        ModelNotFoundError: There is no such model.
        InvalidArgumentError: a revision of something that has none, or a configuration where weights are needed.
        UnsupportedArgumentError: A GGUF file or a pipeline, and the package that reads it is missing.
    """
    if name is not None and name.lower().endswith(".gguf"):
        require_package("gguf", f"MODEL: {name}")
    if with_weights and (is_pipeline_folder(name) or is_cached_pipeline(name, revision)):
        if takes_pipelines:
            require_package("diffusers", f"MODEL: {name}", extra="diffusion")
            return
        raise InvalidArgumentError(
            f"MODEL: expected a model of transformers, got {name}, a pipeline of diffusers; use torchax-serve draw"
        )
    source = parse_name(name, revision)
    if (folder := bundle_folder(name)) is not None and holds_module(folder):
        raise InvalidArgumentError(
            f"MODEL: expected a model of transformers, got {name}, the bundle of a module, which no command runs; load "
            "it in Python by torchax_serve.serve"
        )
    if isinstance(source, ModelSource) and source.kind == "config" and with_weights:
        raise InvalidArgumentError(
            f"MODEL: expected a model with weights, got the configuration {name}; give the folder of the model"
        )


def refuse_bundle(name: str | None, remedy: str) -> None:
    """Raises InvalidArgumentError if MODEL is a bundle; the command needs PyTorch.

    Args:
        name: Name on the command line.
        remedy: What to do instead.
    """
    if bundle_folder(name) is not None:
        raise InvalidArgumentError(
            f"MODEL: expected a model, got the bundle {name}, which has no PyTorch model; {remedy}"
        )


def check_one_model(name: str | None, random_weights: Path | None, revision: str | None = None) -> None:
    """Checks the model of a command that takes MODEL or ``--random-weights``, never both.

    With ``--random-weights`` the command makes the weights up.
    """
    if random_weights is None:
        check_model(name, revision)
        return
    if name is not None:
        raise InvalidArgumentError(f"--random-weights: expected without MODEL, got {name}; leave one of them out")
    if not random_weights.exists():
        raise InvalidArgumentError(
            f"--random-weights: expected a configuration (a JSON file, or a folder with config.json), and there is "
            f"none at {random_weights}"
        )


def may_have_template(name: str | None) -> bool:
    """Returns whether model `name` may have a chat template; True if its files are absent."""
    source = parse_name(name)
    if not isinstance(source, ModelSource) or source.folder is None:
        return True
    if any(source.folder.glob("*.jinja")) or (source.folder / "chat_template.json").is_file():
        return True
    try:
        return "chat_template" in (source.folder / "tokenizer_config.json").read_text("utf-8", errors="replace")
    except OSError:
        return False


def complete_model(incomplete: str) -> list[str]:
    """Returns the shell's completions for MODEL: short names and downloaded models.

    Paths are left to the shell.
    """
    start = incomplete.lower()
    return [name for name in [*SHORT_NAMES, *downloaded()] if name.lower().startswith(start)]


def complete_downloaded(incomplete: str) -> list[str]:
    """Returns the shell's completions for a downloaded model.

    These are hub ids, and short names if there are any.
    """
    here = downloaded()
    short = [name for name, entry in SHORT_NAMES.items() if entry.hub_id in here]
    return [name for name in [*short, *here] if name.lower().startswith(incomplete.lower())]


def complete_served(incomplete: str) -> list[str]:
    """Returns the shell's completions for ``NAME=MODEL`` and MODEL."""
    names, sign, start = incomplete.rpartition("=")
    return [f"{names}{sign}{name}" for name in complete_model(start)]


ServedModels = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=]MODEL",
        show_default=False,
        autocompletion=complete_served,
        help="Short name, hub id or folder, behind a name for requests or alone; several are loaded at their first "
        "request. Without it the small model of the package.",
    ),
]
"""MODELs of the server."""

OptionalModel = Annotated[
    str | None,
    typer.Argument(
        show_default=False,
        autocompletion=complete_model,
        help="Short name, hub id or folder; without it the small model of the package.",
    ),
]
"""MODEL of the commands that take the embedded model where none is given."""
