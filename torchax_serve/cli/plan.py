"""``torchax-serve plan``: does a model fit on hardware that need not be here, and what bounds its speed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.cli.options import ConfigOptions, option_groups


@option_groups
def plan(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, short name, folder or config file; without it the embedded model.")
    ] = None,
    topology: Annotated[
        str | None, typer.Option("--topology", help="Devices to compile for, such as v6e:2x4 or h200:8.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="How they are used, such as data=2,model=4; all on model by default.")
    ] = None,
    max_len: Annotated[int | None, typer.Option("--max-len", help="Tokens of a request, prompt and answer.")] = None,
    slots: Annotated[int, typer.Option("--slots", help="Requests at once.")] = 64,
    page_len: Annotated[int, typer.Option("--page-len", help="Tokens of a page of the cache.")] = 64,
    prefill: Annotated[
        str, typer.Option("--prefill", help="Tokens of the prefill steps to compile, with commas; empty for none.")
    ] = "1024",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    quantization: Annotated[
        str | None, typer.Option("--quantization", help="Not supported yet; refused by name.")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option("--for", help="SLOTSxLEN, such as 64x8192: the smallest topologies that fit, as a table."),
    ] = None,
    sharding: Annotated[
        bool, typer.Option("--sharding", help="Print how each parameter lies on the mesh, and compile nothing.")
    ] = False,
    refuse_uneven: Annotated[
        bool, typer.Option("--refuse-uneven", help="An error where sizes would be filled up with zeros.")
    ] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Folder for the compiled programs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a report.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compile even what was planned before.")] = False,
    *,
    load: ConfigOptions,
) -> None:
    """Compile a model's steps for hardware that need not be here: fits or not, bytes a device, exchange, time bound."""
    _refuse_quantization(quantization)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the devices planned for are described, never opened
    from torchax_serve.planning.abstract import empty_module

    module = empty_module(model, **load.kwargs())
    name = model or "the embedded model"
    if sharding:
        _sharding(module, topology, mesh, refuse_uneven=refuse_uneven, as_json=as_json)
        return
    options: dict[str, Any] = {
        "mesh": mesh,
        "page_len": page_len,
        "prefill_lens": _lengths(prefill),
        "kv_cache_dtype": kv_cache_dtype,
        "refuse_uneven": refuse_uneven,
    }
    if search is not None:
        _search(module, name, search, {"topology": topology, "--mesh": mesh, "--save": save}, options, as_json=as_json)
        return
    options |= {"topology": _given(topology), "max_len": max_len, "num_slots": slots}
    _plan(module, name, options, save, as_json, no_cache)


def _refuse_quantization(quantization: str | None) -> None:
    if quantization is not None:
        raise UnsupportedArgumentError(
            f"--quantization {quantization}: quantized weights are not supported yet; leave the option out"
        )


def _given(topology: str | None) -> str:
    if topology is None:
        raise InvalidArgumentError("expected --topology, such as v6e:2x4 or h200:8, or --for SLOTSxLEN; got neither")
    return topology


def _plan(module: Any, name: str, options: dict[str, Any], save: Path | None, as_json: bool, no_cache: bool) -> None:
    from torchax_serve.planning.kept import kept_plan
    from torchax_serve.planning.plan import PlanRequest
    from torchax_serve.planning.report import print_plan

    report, was_kept = kept_plan(module, name, PlanRequest(**options), save=save, use_kept=not no_cache)
    if as_json:
        print(json.dumps(report.to_json() | {"from_cache": was_kept}, indent=1))
    else:
        print_plan(report, was_kept=was_kept)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InvalidArgumentError(f"--prefill: expected numbers such as 256,1024, got {text!r}") from error


def _sharding(module: Any, topology: str | None, mesh: str | None, *, refuse_uneven: bool, as_json: bool) -> None:
    from torchax_serve.planning.table import print_sharding, sharding_rows

    rows = sharding_rows(module, topology, mesh, refuse_uneven=refuse_uneven)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_sharding(rows)


def _search(
    module: Any, name: str, wanted: str, useless: dict[str, Any], options: dict[str, Any], *, as_json: bool
) -> None:
    if given := [option for option, value in useless.items() if value is not None]:
        raise InvalidArgumentError(f"{given[0]}: expected without --for, which looks for one itself; leave it out")
    from torchax_serve.planning.search import parse_wanted, print_search, search

    num_slots, max_len = parse_wanted(wanted)
    rows = search(module, name, num_slots, max_len, options)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_search(rows, wanted)
    sys.stdout.flush()
