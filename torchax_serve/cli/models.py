"""``torchax-serve models``: what can be run."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Collection
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError, ModelNotFoundError

_EMBEDDED = "torchax-serve run, without a name"


def models(
    model_type: Annotated[str | None, typer.Argument(help="A model type, to see how it was checked.")] = None,
    list_all: Annotated[bool, typer.Option("--all", help="Also list the architectures by name.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    sharding: Annotated[
        bool, typer.Option("--sharding", help="How each parameter of MODEL_TYPE lies on a mesh, at its default sizes.")
    ] = False,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="With --sharding: such as model=4,expert=2; model=8 by default.")
    ] = None,
) -> None:
    """List what can be run: the embedded model, the short names, and the architectures that were checked."""
    from model_adapters.loading.names import SHORT_NAMES
    from torchax_serve.cli.checked import shipped_tasks

    architectures = _architectures()
    if mesh is not None and not sharding:
        raise InvalidArgumentError("--mesh: expected together with --sharding; add it")
    if sharding:
        if model_type is None:
            raise InvalidArgumentError(
                "--sharding: expected a MODEL_TYPE, got none; such as torchax-serve models llama"
            )
        _check_type(model_type, architectures, "a causal language model")
        _print_sharding(model_type, mesh, as_json=as_json)
        return
    if model_type is not None:
        _print_one(model_type, architectures, as_json=as_json)
        return
    if as_json:
        short_names = {
            name: {"hub_id": entry.hub_id, "num_parameters": entry.num_parameters, "note": entry.note}
            for name, entry in SHORT_NAMES.items()
        }
        everything = {
            "embedded": _EMBEDDED,
            "short_names": short_names,
            "architectures": architectures,
            "checked": shipped_tasks(),
        }
        print(json.dumps(everything, indent=1))
        return
    _print_tables(SHORT_NAMES, architectures, list_all=list_all)


def _architectures() -> dict[str, list[str]]:
    """Model types that transformers knows as causal language models, each with its classes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        model_type: [classes] if isinstance(classes, str) else list(classes)
        for model_type, classes in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    }


def _print_sharding(model_type: str, mesh: str | None, *, as_json: bool) -> None:
    """A row for each parameter: shape, axes, who says so, bytes on each device."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed
    from torchax_serve.planning.abstract import module_of_type
    from torchax_serve.planning.table import print_sharding, sharding_rows

    rows = sharding_rows(module_of_type(model_type), None, mesh)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_sharding(rows)


def _check_type(model_type: str, known: Collection[str], kind: str) -> None:
    """Raises for a type that is not among those `known`, with near ones; `kind` says what those are."""
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=5)
        raise ModelNotFoundError(
            f"expected a model type of {kind} in transformers, got {model_type!r}; "
            + (f"did you mean {', '.join(near)}?" if near else "`torchax-serve models --all` lists them")
        )


def _print_one(model_type: str, architectures: dict[str, list[str]], *, as_json: bool) -> None:
    """What is known about `model_type`, by task."""
    from torchax_serve.cli.checked import of_type, print_type, types_by_task

    known = {name for types in types_by_task().values() for name in types}
    _check_type(model_type, known, "a model of text, of sounds or of images and text")
    if as_json:
        classes = architectures.get(model_type, [])
        print(json.dumps({"model_type": model_type, "classes": classes, "tasks": of_type(model_type)}, indent=1))
    else:
        print_type(model_type)


def _size(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.1f} B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.0f} M"


def _print_tables(short_names: Any, architectures: dict[str, list[str]], *, list_all: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    # Without a terminal rich assumes 80 columns and folds; a file or a pipe wants a row on a line.
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(box=None, header_style="bold")
    for heading, justify in (("name", "left"), ("parameters", "right"), ("hub id", "left"), ("", "left")):
        table.add_column(heading, justify=justify, no_wrap=heading == "name")  # type: ignore[arg-type]
    table.add_row("(none)", "", "embedded", _EMBEDDED)
    for name, entry in short_names.items():
        table.add_row(name, _size(entry.num_parameters), entry.hub_id, entry.note)
    console.print(table)
    console.print(
        f"\nAny other causal language model of the Hugging Face hub by its id, or a folder: {len(architectures)} "
        f"architectures{' (--all lists them)' if not list_all else ':'}",
        highlight=False,
    )
    _print_checked(console)
    if list_all:
        _print_architectures(console, architectures)


def _print_checked(console: Any) -> None:
    """A line for each task."""
    from torchax_serve.cli.checked import shipped_tasks

    tasks = shipped_tasks()
    versions = next(iter(tasks.values()))["versions"]
    console.print(f"\nChecked beside PyTorch, of transformers {versions['transformers']}:", highlight=False)
    for name, task in tasks.items():
        roads = ", ".join(f"{number} {road}" for road, number in task.get("roads", {}).items())
        console.print(
            f"  {name:12} {task['title']}: {task['passed']} of {task['checked']} pass{f' ({roads})' if roads else ''}",
            highlight=False,
        )
    console.print("torchax-serve models TYPE shows one type.", highlight=False)


def _print_architectures(console: Any, architectures: dict[str, list[str]]) -> None:
    """A row for each type, with the tasks that it has a part in."""
    from rich.table import Table

    from torchax_serve.cli.checked import types_by_task

    table = Table(box=None, header_style="bold")
    for heading in ("model_type", "tasks", "causal classes"):
        table.add_column(heading, no_wrap=heading == "model_type")
    tasks = types_by_task()
    for model_type in sorted({name for types in tasks.values() for name in types}):
        named = ", ".join(task for task, types in tasks.items() if model_type in types)
        table.add_row(model_type, named, ", ".join(architectures.get(model_type, ())))
    console.print(table)
