"""``torchax-serve plan``: fit and speed bound of a model on hardware that may be absent."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.model_source import EMBEDDED_NAME
from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_options import (
    DTYPES,
    ConfigOptions,
    MaxModelLen,
    check_choice,
    complete_quantization,
    option_groups,
)
from torchax_serve.cli.shared.model_name import check_model, complete_model
from torchax_serve.cli.shared.speculative import SpeculativeJson, parse_speculative
from torchax_serve.cli.shared.terminal import activity, passing_note
from torchax_serve.validation.argument_checks import KV_CACHE_DTYPES
from torchax_serve.validation.library_objects import transformer_config

Model = Annotated[
    str | None,
    typer.Argument(
        autocompletion=complete_model, help="Hub id, short name, folder or config file; without it the embedded model."
    ),
]
Topology = Annotated[str | None, typer.Option("--topology", help="Devices to compile for, such as v6e:2x4 or h200:8.")]
PlanMesh = Annotated[
    str | None, typer.Option("--mesh", help="How they are used, such as data=2,model=4; all on model by default.")
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", min=1, help="Requests at once.")]
PageSize = Annotated[int, typer.Option("--page-size", "--block-size", min=1, help="Tokens of a page of the cache.")]
PrefillLens = Annotated[
    str, typer.Option("--prefill", help="Tokens of the prefill steps to compile, with commas; empty for none.")
]
KVCacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="auto, float32, bfloat16, float16, int8 or fp8.")]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        show_default=False,
        autocompletion=complete_quantization,
        help="Weights with fewer bits: a preset such as int4, a file of rules, or none; by default as the checkpoint.",
    ),
]
Search = Annotated[
    str | None, typer.Option("--for", help="SLOTSxLEN, such as 64x8192: the smallest topologies that fit, as a table.")
]
PrintSharding = Annotated[
    bool, typer.Option("--sharding", help="Print how each parameter lies on the mesh, and compile nothing.")
]
RefuseUneven = Annotated[
    bool, typer.Option("--refuse-uneven", help="An error where sizes would be filled up with zeros.")
]
SaveFolder = Annotated[Path | None, typer.Option("--save", help="Folder for the compiled programs.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a report.")]
ImageSize = Annotated[
    str | None,
    typer.Option("--image-size", show_default=False, help="WIDTHxHEIGHT of an image; 1024x1024 of a pipeline."),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compile even what was planned before.")]


@option_groups
def plan(
    model: Model = None,
    topology: Topology = None,
    mesh: PlanMesh = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 64,
    page_size: PageSize = 64,
    prefill: PrefillLens = "1024",
    kv_cache_dtype: KVCacheDtype = "auto",
    quantization: Quantization = None,
    speculative_config: SpeculativeJson = None,
    search: Search = None,
    sharding: PrintSharding = False,
    refuse_uneven: RefuseUneven = False,
    save: SaveFolder = None,
    as_json: AsJson = False,
    no_cache: NoCache = False,
    image_size: ImageSize = None,
    *,
    load: ConfigOptions,
) -> None:
    """Compile a model's steps for absent hardware: fit, bytes a device, exchange, time bound."""
    check_model(model, load.revision, with_weights=False)
    if model is not None and (denoiser := transformer_config(model)) is not None:
        given = {"--max-model-len": max_model_len, "--quantization": quantization, "--for": search, "--save": save}
        given |= {"--sharding": sharding, "--refuse-uneven": refuse_uneven, "--max-num-seqs": max_num_seqs != 64}
        given |= {"--page-size": page_size != 64, "--prefill": prefill != "1024"}
        given |= {"--kv-cache-dtype": kv_cache_dtype != "auto", "--speculative-config": speculative_config}
        _plan_transformer(model, denoiser, topology, mesh, load.dtype, image_size, given, as_json=as_json)
        return
    check_choice("--kv-cache-dtype", kv_cache_dtype, (*DTYPES, *KV_CACHE_DTYPES))
    speculative = parse_speculative(speculative_config)
    _check_together(topology, mesh, save, search, speculates=speculative is not None, sharding=sharding)
    options: dict[str, Any] = {
        "mesh": mesh,
        "page_size": page_size,
        "prefill_lens": _lengths(prefill),
        "kv_cache_dtype": kv_cache_dtype,
        "refuse_uneven": refuse_uneven,
    }
    os.environ["JAX_PLATFORMS"] = "cpu"  # the devices planned for are described, never opened
    with prompt_interrupts(leave_at=1):
        with passing_note("starting torch and jax ..."):
            from torchax_serve.planning.abstract_model import empty_module

        options["speculation"] = _speculation(speculative, load)
        from model_adapters.loading.model_class import task_of

        module, stated = empty_module(model, **load.kwargs(), any_task=True)
        options["quantization"] = _quantization(quantization, stated)
        name = model or EMBEDDED_NAME
        if (is_head := task_of(module) is not None) and not sharding:
            given = {"--for": search, "--save": save, "--speculative-config": speculative_config}
            given |= {"--page-size": page_size != 64, "--prefill": prefill != "1024"}
            _check_of_head(name, given | {"--kv-cache-dtype": kv_cache_dtype != "auto"})
        elif image_size is not None:
            raise InvalidArgumentError("--image-size: expected with a model of images alone, got another; leave it out")
        with activity() as note:
            if sharding:
                show = _sharding(module, topology, options, as_json=as_json)
            elif is_head:
                sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "image_size": image_size}
                show = _head(module, name, topology, options | sizes, load, note, as_json=as_json)
            elif search is not None:
                show = _search(module, name, search, options, note, as_json=as_json)
            else:
                options |= {"topology": topology, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
                show = _plan(module, name, options, note, save=save, as_json=as_json, use_cache=not no_cache)
    show()


def _plan_transformer(
    model: str,
    config: dict[str, Any],
    topology: str | None,
    mesh: str | None,
    dtype: str,
    image_size: str | None,
    given: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Prints the plan of a diffusion transformer; `given` has options of language models."""
    if refused := [flag for flag, value in given.items() if value]:
        raise InvalidArgumentError(f"{refused[0]}: expected with a language model alone, got a pipeline; leave it out")
    if topology is None:
        raise InvalidArgumentError("expected --topology, such as v6e:2x2, got none; add it")
    os.environ["JAX_PLATFORMS"] = "cpu"
    with prompt_interrupts(leave_at=1), activity() as note:
        note(f"compiling a step of {model} for {topology}")
        from torchax_serve.planning.pipeline_plan import plan_transformer

        report = plan_transformer(model, config, topology, mesh, dtype, image_size or "1024x1024")
    print(json.dumps(report.to_json(), indent=1) if as_json else "\n".join(report.lines()))


def _check_of_head(name: str, given: dict[str, Any]) -> None:
    """Raises InvalidArgumentError for options of models that write texts."""
    if refused := [flag for flag, value in given.items() if value]:
        raise InvalidArgumentError(f"{refused[0]}: expected with a language model alone, got {name}; leave it out")


def _head(
    module: Any,
    name: str,
    topology: str | None,
    options: dict[str, Any],
    load: ConfigOptions,
    note: Callable[[str], None],
    *,
    as_json: bool,
) -> Callable[[], None]:
    from torchax_serve.planning.head_plan import HeadRequest, files_of, plan_head
    from torchax_serve.planning.pipeline_plan import parse_image_size

    assert topology is not None
    note(f"compiling a forward of {name} for {topology}")
    names = ("mesh", "refuse_uneven", "quantization", "max_num_seqs", "max_model_len")
    size = options["image_size"]
    request = HeadRequest(
        topology=topology,
        image_size=None if size is None else parse_image_size(size),
        **{each: options[each] for each in names},
    )
    where = {key: value for key, value in load.kwargs().items() if key != "dtype"}
    report = plan_head(module, files_of(name, **where), request)
    return lambda: print(json.dumps(report.to_json(), indent=1) if as_json else "\n".join(report.lines()))


def _quantization(given: str | None, stated: Any) -> Any:
    """Returns the quantization to plan: a preset, rules of a file, or the configuration's."""
    from model_adapters.quantization.rules import DENSE, PRESETS, parse_rules

    if given is None:
        return stated
    return None if given == DENSE else given if given in PRESETS else parse_rules(given)


def _speculation(given: Any, load: ConfigOptions) -> Any:
    """Returns the options with the draft model that they name, in its own dtype as in `serve`."""
    from torchax_serve.planning.abstract_model import empty_module
    from torchax_serve.planning.speculation import PlannedSpeculation
    from torchax_serve.scheduler.speculative_config import SpeculativeConfig

    config = SpeculativeConfig.parse(given)
    if config is None:
        return None
    if config.method != "draft_model":
        return PlannedSpeculation(config)
    draft, stated = empty_module(config.model, **{**load.kwargs(), "dtype": "auto", "revision": None})
    return PlannedSpeculation(config, draft, stated)


def _check_together(
    topology: str | None,
    mesh: str | None,
    save: Path | None,
    search: str | None,
    *,
    speculates: bool,
    sharding: bool,
) -> None:
    """Raises `InvalidArgumentError` for options that do not go together."""
    from torchax_serve.distributed.mesh_shape import parse_mesh
    from torchax_serve.planning.chips import check_compiler, num_devices

    if sharding and speculates:
        raise InvalidArgumentError(
            "--speculative-config: expected without --sharding, which tells of the model alone; leave it out"
        )
    number = None if topology is None else num_devices(topology)
    if mesh is not None:
        parse_mesh(mesh, number)
    if search is not None:
        _wanted(search)
        others = {"--topology": topology, "--mesh": mesh, "--save": save, "--sharding": sharding or None}
        if given := [flag for flag, value in others.items() if value is not None]:
            raise InvalidArgumentError(
                f"{given[0]}: expected without --for, which looks for the smallest devices itself; leave it out"
            )
    elif topology is None and not sharding:
        raise InvalidArgumentError("expected --topology, such as v6e:2x4 or h200:8, or --for SLOTSxLEN; got neither")
    elif topology is not None and not sharding:
        check_compiler(topology)


def _wanted(text: str) -> tuple[int, int]:
    """Parses ``64x8192`` as slots and length; raises `InvalidArgumentError` for anything else."""
    found = re.fullmatch(r"(\d+)x(\d+)", text.strip())
    if not found or not int(found[1]) or int(found[2]) < 2:
        raise InvalidArgumentError(f"--for: expected SLOTSxLEN such as 64x8192, got {text!r}")
    return int(found[1]), int(found[2])


# Each returns a function that prints the result: it is called after the progress line is gone.


def _plan(
    module: Any,
    name: str,
    options: dict[str, Any],
    note: Callable[[str], None],
    *,
    save: Path | None,
    as_json: bool,
    use_cache: bool,
) -> Callable[[], None]:
    from torchax_serve.planning.plan import PlanRequest
    from torchax_serve.planning.plan_cache import cached_plan
    from torchax_serve.planning.report import print_plan

    report, from_cache = cached_plan(module, name, PlanRequest(**options), save=save, use_cache=use_cache, note=note)
    if as_json:
        return lambda: print(json.dumps(report.to_json() | {"from_cache": from_cache}, indent=1))
    return lambda: print_plan(report, from_cache=from_cache)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InvalidArgumentError(f"--prefill: expected numbers such as 256,1024, got {text!r}") from error
    if any(length < 1 for length in lengths):
        raise InvalidArgumentError(f"--prefill: expected positive numbers, got {text!r}")
    return lengths


def _sharding(module: Any, topology: str | None, options: dict[str, Any], *, as_json: bool) -> Callable[[], None]:
    from torchax_serve.planning.sharding_table import print_sharding, sharding_rows

    chosen = {name: options[name] for name in ("mesh", "refuse_uneven", "quantization")}
    rows = sharding_rows(module, topology, **chosen)
    return (lambda: print(json.dumps(rows, indent=1))) if as_json else (lambda: print_sharding(rows))


def _search(
    module: Any, name: str, wanted: str, options: dict[str, Any], note: Callable[[str], None], *, as_json: bool
) -> Callable[[], None]:
    from torchax_serve.planning.search import print_search, search

    rows = search(module, name, *_wanted(wanted), options, note=note)
    return (lambda: print(json.dumps(rows, indent=1))) if as_json else (lambda: print_search(rows, wanted))


COMMAND = Command(
    "plan",
    plan,
    position=50,
    examples=(("plan qwen3-32b --topology v6e:2x4", "would it fit there, and how fast at most"),),
)
