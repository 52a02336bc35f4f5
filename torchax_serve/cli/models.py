"""``torchax-serve models``: lists the models that can be run."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError, ModelNotFoundError
from model_adapters.loading.downloads import list_downloads
from model_adapters.loading.hub_cache import hub_cache
from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.downloads import CacheDir, ago, size_of
from torchax_serve.cli.shared.tables import console
from torchax_serve.distributed.mesh_shape import parse_mesh

_EMBEDDED = "torchax-serve run, without a name"


def models(
    model_type: Annotated[str | None, typer.Argument(help="A model type, to see how it was checked.")] = None,
    list_all: Annotated[bool, typer.Option("--all", help="Also list the architectures by name.")] = False,
    downloaded: Annotated[
        bool, typer.Option("--downloaded", help="List only the models of the hub that are on this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    sharding: Annotated[
        bool, typer.Option("--sharding", help="How each parameter of MODEL_TYPE lies on a mesh, at its default sizes.")
    ] = False,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="With --sharding: such as model=4,expert=2; model=8 by default.")
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """List models on this machine, short names, and the architectures that were checked."""
    _check_flags(model_type, list_all=list_all, downloaded=downloaded, sharding=sharding, mesh=mesh)
    with prompt_interrupts(leave_at=1):
        if downloaded:
            print_downloaded(cache_dir, as_json=as_json)
            return
        _print(model_type, mesh, cache_dir, list_all=list_all, sharding=sharding, as_json=as_json)


def _check_flags(model_type: str | None, *, list_all: bool, downloaded: bool, sharding: bool, mesh: str | None) -> None:
    """Raises for options that do not go together, before anything heavy is imported."""
    if mesh is not None:
        if not sharding:
            raise InvalidArgumentError("--mesh: expected together with --sharding; add it")
        parse_mesh(mesh, None)
    if sharding and model_type is None:
        raise InvalidArgumentError("--sharding: expected a MODEL_TYPE, got none; such as torchax-serve models llama")
    exclusive = {"MODEL_TYPE": model_type is not None, "--all": list_all, "--sharding": sharding}
    if downloaded and (given := [name for name, is_given in exclusive.items() if is_given]):
        raise InvalidArgumentError(f"--downloaded: expected without {given[0]}; leave one of them out")


def _print(
    model_type: str | None, mesh: str | None, cache_dir: Path | None, *, list_all: bool, sharding: bool, as_json: bool
) -> None:
    from model_adapters.loading.short_names import SHORT_NAMES
    from torchax_serve.cli.shared.parity_status import shipped_tasks

    architectures = _architectures()
    if sharding and model_type is not None:
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
            "downloaded": [each.as_dict() for each in list_downloads(cache_dir)],
            "embedded": _EMBEDDED,
            "short_names": short_names,
            "architectures": architectures,
            "checked": shipped_tasks(),
        }
        print(json.dumps(everything, indent=1))
        return
    print_downloaded(cache_dir, as_json=False)
    _print_tables(SHORT_NAMES, architectures, list_all=list_all)


def print_downloaded(cache_dir: Path | None, *, as_json: bool) -> None:
    """Prints a row for each model of the hub on this machine: size, last use, revisions."""
    downloads = list_downloads(cache_dir)
    if as_json:
        print(json.dumps({"downloaded": [each.as_dict() for each in downloads]}, indent=1))
        return
    from rich.table import Table

    if not downloads:
        print(
            f"No model of the hub is in {hub_cache(cache_dir)}; torchax-serve pull NAME brings one.\n", file=sys.stderr
        )
        return
    table = Table(box=None, header_style="bold")
    table.add_column("on this machine", overflow="fold")
    for heading, justify in (("size", "right"), ("last used", "left"), ("revision", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for each in downloads:
        revisions = [", ".join([*revision.names, revision.commit[:12]]) for revision in each.revisions]
        partial = ["not finished: pull it again, or rm it"] if each.is_partial else []
        name = f"{each.short_name} ({each.hub_id})" if each.short_name else each.hub_id
        table.add_row(name, size_of(each.size_bytes), ago(each.last_used), "\n".join([*revisions, *partial]))
    console(200).print(table)
    total = sum(each.size_bytes for each in downloads)
    print(f"{size_of(total)} in {hub_cache(cache_dir)}; torchax-serve rm NAME deletes one\n", file=sys.stderr)


def _architectures() -> dict[str, list[str]]:
    """Returns transformers' types of causal language models, each with its classes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        model_type: [classes] if isinstance(classes, str) else list(classes)
        for model_type, classes in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    }


def _print_sharding(model_type: str, mesh: str | None, *, as_json: bool) -> None:
    """Prints a row for each parameter: shape, mesh axes, the rule, bytes on each device."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed
    from torchax_serve.planning.abstract_model import module_of_type
    from torchax_serve.planning.sharding_table import print_sharding, sharding_rows

    rows = sharding_rows(module_of_type(model_type), None, mesh)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_sharding(rows)


def _check_type(model_type: str, known: Collection[str], kind: str) -> None:
    """Raises ModelNotFoundError for a type that is not in `known`, with similar names.

    `kind` describes the known types.
    """
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=5)
        raise ModelNotFoundError(
            f"expected a model type of {kind} in transformers, got {model_type!r}; "
            + (f"did you mean {', '.join(near)}?" if near else "`torchax-serve models --all` lists them")
        )


def _print_one(model_type: str, architectures: dict[str, list[str]], *, as_json: bool) -> None:
    """Prints the parity results of `model_type`, by task."""
    from torchax_serve.cli.shared.parity_status import of_type, print_type, quirk_of_type, types_by_task

    known = {name for types in types_by_task().values() for name in types}
    _check_type(model_type, known, "a model of text, of audio or of images and text")
    if as_json:
        classes = architectures.get(model_type, [])
        known_of_type = {"classes": classes, "tasks": of_type(model_type), "quirk": quirk_of_type(model_type)}
        print(json.dumps({"model_type": model_type, **known_of_type}, indent=1))
    else:
        print_type(model_type)


def _size(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.1f} B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.0f} M"


def _print_tables(short_names: Any, architectures: dict[str, list[str]], *, list_all: bool) -> None:
    from rich.table import Table

    output = console(200)
    table = Table(box=None, header_style="bold")
    for heading, justify in (("name", "left"), ("parameters", "right"), ("hub id", "left"), ("", "left")):
        table.add_column(heading, justify=justify, no_wrap=heading == "name")  # type: ignore[arg-type]
    table.add_row("(none)", "", "embedded", _EMBEDDED)
    for name, entry in short_names.items():
        table.add_row(name, _size(entry.num_parameters), entry.hub_id, entry.note)
    output.print(table)
    output.print(
        f"\nAny other causal language model of the Hugging Face hub by its id, or a folder: {len(architectures)} "
        f"architectures{' (--all lists them)' if not list_all else ':'}",
        highlight=False,
    )
    _print_checked(output)
    if list_all:
        _print_architectures(output, architectures)


def _print_checked(console: Any) -> None:
    """Prints a line for each parity task."""
    from torchax_serve.cli.shared.parity_status import shipped_tasks

    tasks = shipped_tasks()
    versions = next(iter(tasks.values()))["versions"]
    console.print(f"\nChecked against PyTorch, with transformers {versions['transformers']}:", highlight=False)
    for name, task in tasks.items():
        executors = ", ".join(f"{number} {executor}" for executor, number in task.get("executors", {}).items())
        counts = f"{task['passed']} of {task['checked']} pass{f' ({executors})' if executors else ''}"
        console.print(f"  {name:12} {task['title']}: {counts}", highlight=False)
    console.print("torchax-serve models TYPE shows one type.", highlight=False)


def _print_architectures(console: Any, architectures: dict[str, list[str]]) -> None:
    """Prints a row for each type, with the tasks that check it."""
    from rich.table import Table

    from torchax_serve.cli.shared.parity_status import types_by_task

    table = Table(box=None, header_style="bold")
    for heading in ("model_type", "tasks", "causal classes"):
        table.add_column(heading, no_wrap=heading == "model_type")
    tasks = types_by_task()
    for model_type in sorted({name for types in tasks.values() for name in types}):
        named = ", ".join(task for task, types in tasks.items() if model_type in types)
        table.add_row(model_type, named, ", ".join(architectures.get(model_type, ())))
    console.print(table)


COMMAND = Command("models", models, position=70, examples=(("models", "what is on this machine, and what can be run"),))
