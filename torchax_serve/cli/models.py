"""``torchax-serve models``: what can be run."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
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
    """List what can be run: the embedded model, the short names, and every causal architecture of transformers."""
    from model_adapters.loading.names import SHORT_NAMES

    architectures = _architectures()
    if mesh is not None and not sharding:
        raise InvalidArgumentError("--mesh: expected together with --sharding; add it")
    if sharding:
        if model_type is None:
            raise InvalidArgumentError(
                "--sharding: expected a MODEL_TYPE, got none; such as torchax-serve models llama"
            )
        _check_type(model_type, architectures)
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
            "checked": _checked(),
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


def _checked() -> dict[str, Any]:
    """The sweep that comes with the package: versions, numbers, and each type's result."""
    from torchax_serve.parity.table import shipped, summary

    versions, results = shipped()
    by_type = {name: dataclasses.asdict(result) for name, result in results.items()}
    return {"versions": versions, **summary(results), "results": by_type}


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


def _check_type(model_type: str, architectures: dict[str, list[str]]) -> None:
    """Raises for a type that transformers does not know, with near ones."""
    if model_type not in architectures:
        near = difflib.get_close_matches(model_type, architectures, n=5)
        raise ModelNotFoundError(
            f"expected a model type of a causal language model in transformers, got {model_type!r}; "
            + (f"did you mean {', '.join(near)}?" if near else "`torchax-serve models --all` lists them")
        )


def _print_one(model_type: str, architectures: dict[str, list[str]], *, as_json: bool) -> None:
    """What is known about `model_type`."""
    _check_type(model_type, architectures)
    checked = _checked()
    fields = checked["results"].get(model_type)
    if as_json:
        print(json.dumps({"model_type": model_type, "classes": architectures[model_type], "checked": fields}, indent=1))
        return
    print(f"{model_type}: {', '.join(architectures[model_type])}")
    if fields is None:
        print(f"not checked: newer than the table, of transformers {checked['versions']['transformers']}")
        return
    for name, value in fields.items():
        if name not in ("model_type", "class_name") and value not in (None, []):
            print(f"  {name:20} {', '.join(value) if isinstance(value, list) else value}")


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
    checked = _checked()
    roads = ", ".join(f"{number} {road}" for road, number in checked["roads"].items())
    console.print(
        f"Checked beside PyTorch, token for token (transformers {checked['versions']['transformers']}): "
        f"{checked['passed']} of {checked['checked']} pass ({roads}); torchax-serve models TYPE shows one.",
        highlight=False,
    )
    if list_all:
        architecture_table = Table(box=None, header_style="bold")
        architecture_table.add_column("model_type", no_wrap=True)
        architecture_table.add_column("classes")
        for model_type, classes in architectures.items():
            architecture_table.add_row(model_type, ", ".join(classes))
        console.print(architecture_table)
