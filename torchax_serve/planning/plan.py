"""Plans a model on a topology: does it fit, what it exchanges, what bounds its speed.

All numbers come from the compiled steps: XLA's compilers for TPUs and GPUs need a description of the devices, not the
devices. Weights are shapes without values.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError, OutOfMemoryError, UnsupportedArgumentError
from model_adapters.loading.memory import give_back_freed
from model_adapters.quantization.loading import describe_weights
from torchax_serve.distributed.mesh import mesh_of
from torchax_serve.distributed.mesh_shape import parse_mesh
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.kv_cache.pools import CacheAllocation
from torchax_serve.kv_cache.scales import PAGES_IN_8_BITS
from torchax_serve.planning.abstract_model import AbstractModel, Quantization, abstract_model
from torchax_serve.planning.cache_sizes import CacheSizes
from torchax_serve.planning.chips import Chip, chip_of
from torchax_serve.planning.compiled_steps import ProgramReport, compile_step
from torchax_serve.planning.executors import PlannedExecutor, planned_executor
from torchax_serve.planning.roofline import StepBound, bound_of
from torchax_serve.planning.speculation import DraftSizes, PlannedSpeculation, draft_sizes
from torchax_serve.planning.topology import compiling_for, describe
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler import SpeculativeConfig
from torchax_serve.scheduler.config import check_int
from torchax_serve.validation.argument_checks import KV_CACHE_DTYPES

MAX_COMPILER_TIME_S = 0.5
"""Largest bound of a step, in seconds, for which the compiler's time is reported.

Some compilers report their time modulo a second, so that of a longer step may be wrong.
"""
PAGE_DTYPES = ("auto", "float32", "bfloat16", "float16", *KV_CACHE_DTYPES)

_PARTS_OF_BFLOAT16 = {"int8": 0.52, "int4": 0.3}
"""Bytes of quantized weights with their scales and what stays dense, compared with bfloat16, about."""

Note = Callable[[str], None]
"""Function that is called with a text before each part that may take a while."""


def no_note(text: str) -> None:
    """Ignores the text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Devices and sizes to plan for.

    Attributes:
        topology: Devices, such as ``v6e:2x4`` or ``h200:8``.
        mesh: Sizes of mesh axes, such as ``data=2,model=4``; None: all devices on ``model``.
        max_model_len: Number of tokens of a request, prompt and answer; None: the model's own limit, at most 8192.
        max_num_seqs: Number of requests at once, of all replicas together.
        page_size: Number of tokens in a page.
        prefill_lens: Numbers of tokens of the prefill steps to compile.
        kv_cache_dtype: Dtype of pages; "auto" is that of the weights.
        refuse_uneven: Whether sizes that would be padded with zeros are an error.
        quantization: Preset, rules, or what the model's configuration states; None: weights are dense.
        speculation: Options of speculation, with their draft model; None: no step verifies drafts.
    """

    topology: str
    mesh: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    page_size: int = 64
    prefill_lens: tuple[int, ...] = (1024,)
    kv_cache_dtype: str = "auto"
    refuse_uneven: bool = False
    quantization: Quantization = None
    speculation: PlannedSpeculation | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "page_size"):
            check_int(name, getattr(self, name), 1, "give a positive number")
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2, "a request has a token of prompt and a new one")
        for length in self.prefill_lens:
            check_int("prefill", length, 1, "give positive numbers")
        if self.kv_cache_dtype not in PAGE_DTYPES:
            raise InvalidArgumentError(
                f"kv_cache_dtype: expected one of {', '.join(PAGE_DTYPES)}, got {self.kv_cache_dtype!r}; choose one"
            )
        if self.kv_cache_dtype == "fp8":
            chip = chip_of(self.topology)
            if chip.platform != "cpu" and not chip.multiplies_fp8:
                raise InvalidArgumentError(
                    f"kv_cache_dtype: expected int8 or auto for {chip.name}, which has no float8, got fp8; use int8"
                )


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """Result of a plan; bytes are those of one device unless a comment says otherwise."""

    model: str
    model_type: str
    dtype: str
    quantization: str  # which weights have how many bits; empty if all are in `dtype`
    weight_bits: float  # of a number on average, with scales
    topology: str
    num_devices: int
    num_replicas: int
    mesh: Mapping[str, int]
    max_model_len: int
    max_num_seqs: int  # of one replica
    page_size: int
    kv_cache_dtype: str
    executor: str  # packed, per-sequence or static, as the engine chooses it
    fallback_reason: str | None  # why not a faster executor
    fits: bool
    memory_bytes: int
    weights_bytes: int
    weights_bytes_of_one_device: int  # of all weights, as if there were one device
    pages_bytes: int
    pages_bytes_wanted: int  # for all slots at full length
    states_bytes: int  # states of fixed size, for all slots
    temporary_bytes: int
    token_bytes: int  # of cache, for one more token
    num_pages: int  # of one replica, in the group of layers with the most
    num_tokens: int  # that the pages hold
    most_tokens: int  # that fit into the memory left by weights, states and steps
    most_slots: int  # full-length requests that fit into the memory left by weights and steps
    remedies: tuple[str, ...]
    programs: tuple[ProgramReport, ...]
    bounds: tuple[StepBound, ...]
    speculation: str = ""  # who drafts, and how many; empty: nobody
    draft_weights_bytes: int = 0  # of a draft model or head
    draft_pages_bytes: int = 0  # of a draft model, for all slots; those of a head are among the model's
    draft_bound: StepBound | None = None  # of drafting for one verify step, by a draft model

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, pages of all slots, states and temporaries, those of drafts included."""
        of_model = self.weights_bytes + self.pages_bytes_wanted + self.states_bytes + self.temporary_bytes
        return of_model + self.draft_weights_bytes + self.draft_pages_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON types."""
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PlanReport:
        """Builds a report from the result of `to_json`."""
        fields = dict(content)
        fields.pop("total_bytes")
        programs = tuple(
            ProgramReport(**{**each, "collectives": {k: (v[0], v[1]) for k, v in each["collectives"].items()}})
            for each in fields.pop("programs")
        )
        bounds = tuple(StepBound(**each) for each in fields.pop("bounds"))
        fields["remedies"] = tuple(fields["remedies"])
        if fields["draft_bound"] is not None:
            fields["draft_bound"] = StepBound(**fields["draft_bound"])
        return cls(**fields, programs=programs, bounds=bounds)


def make_plan(
    module: PreTrainedModel, name: str, request: PlanRequest, *, save: Path | None = None, note: Note = no_note
) -> PlanReport:
    """Shards `module` on the topology, compiles its steps and reports what they need.

    Args:
        module: Model on the meta device.
        name: Name of the model in the report.
        request: Devices and sizes to plan for.
        save: Folder for the compiled programs.
        note: Called with a text before each part that may take a while.

    Raises:
        TorchaxServeError: The topology, mesh or model cannot be planned; says why.
    """
    chip, devices = describe(request.topology)
    shape = parse_mesh(request.mesh, len(devices))
    num_replicas = shape["data"]
    per_replica = shape | {"data": 1}
    mesh = mesh_of(devices[: math.prod(per_replica.values())], per_replica)
    model = abstract_model(
        module, mesh, refuse_uneven=request.refuse_uneven, quantization=request.quantization, chip=chip
    )
    runtime = ModelRuntime(module, model.weights, sharding=model.sharding)  # type: ignore[arg-type]
    max_len = _max_len(runtime, request)
    num_slots = -(-request.max_num_seqs // num_replicas)
    note(f"tracing {name} for {request.topology}")
    with compiling_for(chip):
        executor, drafts = _executor(runtime, model, chip, request, max_len, num_slots)
    page_size = executor.row_capacity or request.page_size
    of_drafts = drafts.slot_bytes, drafts.weights_bytes
    sizes = CacheSizes(model, chip, executor, page_size, max_len, num_slots, *of_drafts)
    programs: list[ProgramReport] = []
    bounds: list[StepBound] = []
    cache, out_of_memory = sizes.plan(), None
    if cache is not None:
        lens = sorted({min(length, max_len) for length in request.prefill_lens})
        try:
            for step in executor.steps(*cache, lens):
                note(f"compiling {step.name} of {step.num_tokens} tokens for {request.topology}")
                report, compiled = compile_step(step, model, chip)
                if save is not None:
                    _save(save, f"{step.name}-{step.num_tokens}", compiled)
                # A program of many layers takes hundreds of megabytes, and the compiler's scratch memory, which the C
                # library would not return to the system, half a gigabyte.
                del compiled
                gc.collect()
                give_back_freed()
                bounds.append(bound_of(model, chip, executor, step))
                if report.num_opaque and (bounds[-1].seconds or 0) > MAX_COMPILER_TIME_S:
                    report = dataclasses.replace(report, compiler_s=None)
                programs.append(report)
        except OutOfMemoryError as error:
            out_of_memory = str(error)
    plan = None if cache is None else cache[0]
    made = _report(name, request, sizes, plan, num_replicas, tuple(programs), tuple(bounds), out_of_memory)
    return made if request.speculation is None else _with_drafts(made, request.speculation.config, sizes, drafts)


def _executor(
    runtime: ModelRuntime, model: AbstractModel, chip: Chip, request: PlanRequest, max_len: int, num_slots: int
) -> tuple[PlannedExecutor, DraftSizes]:
    """Returns the executor, with the layer of a draft head if there is one, and its sizes."""
    speculation, page_size = request.speculation, request.page_size
    config = None if speculation is None else speculation.config
    executor = planned_executor(runtime, model.sharding, page_size, max_len, num_slots, config)
    if speculation is None:
        return _with_dtype(executor, request), DraftSizes()
    budget = MemoryBudget(max_len, num_slots, page_size, num_slots, None)
    drafts = draft_sizes(speculation, model, executor, chip, budget, refuse_uneven=request.refuse_uneven)
    return drafts.with_head(_with_dtype(executor, request)), drafts


def _with_drafts(report: PlanReport, config: SpeculativeConfig, sizes: CacheSizes, drafts: DraftSizes) -> PlanReport:
    """Returns the report with what speculation takes."""
    model = "" if config.model is None else f" {config.model}"
    return dataclasses.replace(
        report,
        speculation=f"{config.method}{model}, {config.num_speculative_tokens} drafts",
        draft_weights_bytes=sizes.draft_weights_bytes,
        draft_pages_bytes=sizes.num_slots * sizes.draft_slot_bytes,
        draft_bound=drafts.bound(sizes.chip, sizes.num_slots, sizes.max_len, config.num_speculative_tokens),
    )


def _max_len(runtime: ModelRuntime, request: PlanRequest) -> int:
    limits = runtime.limits
    limit = limits.max_positions
    if request.max_model_len is None:
        return min(8192, limit or 8192)
    if limits.learned_positions is not None and request.max_model_len > limits.learned_positions:
        raise InvalidArgumentError(
            f"max_model_len: expected at most {limits.learned_positions}, the positions this model has, got "
            f"{request.max_model_len}; lower it"
        )
    return request.max_model_len


def _with_dtype(executor: PlannedExecutor, request: PlanRequest) -> PlannedExecutor:
    """Returns `executor` with pages of the requested dtype."""
    name = request.kv_cache_dtype
    if name == "auto":
        return executor
    dtype = np.dtype(PAGES_IN_8_BITS.get(name) or jnp.dtype(name))
    is_same = all(shape.dtype == dtype for shape in executor.pages)
    if executor.name == "static" or (executor.name == "per-sequence" and name not in KV_CACHE_DTYPES and not is_same):
        choices = "'auto'" if executor.name == "static" else "'auto', 'int8' or 'fp8'"
        raise UnsupportedArgumentError(
            f"kv_cache_dtype: expected {choices} for a model that is not packed but {executor.name}, got "
            f"{request.kv_cache_dtype!r}; leave it out"
        )
    pages = tuple(dataclasses.replace(shape, dtype=dtype) for shape in executor.pages)
    return dataclasses.replace(executor, pages=pages)


def _save(folder: Path, name: str, program: Any) -> None:
    """Pickles a program for loading on a machine with that topology.

    `jax.experimental.serialize_executable` loads it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(serialize_executable.serialize(program)))


def _report(
    name: str,
    request: PlanRequest,
    sizes: CacheSizes,
    cache: CacheAllocation | None,
    num_replicas: int,
    programs: tuple[ProgramReport, ...],
    bounds: tuple[StepBound, ...],
    out_of_memory: str | None,
) -> PlanReport:
    model, chip, executor = sizes.model, sizes.chip, sizes.executor
    weights = model.weights_bytes_per_device
    temporary = max((p.temporary_bytes + p.code_bytes for p in programs), default=0)
    pages = 0
    if cache is not None:
        pages = sum(group.num_pages * sizes.group_bytes(group.window) for group in cache.groups)
    left = chip.memory_bytes - sizes.weights_bytes - temporary
    wanted = sizes.pages_of(sizes.num_slots)
    fits = out_of_memory is None and cache is not None and sizes.wanted_bytes <= left and pages >= wanted
    mesh = model.mesh_shape | {"data": num_replicas}
    for_tokens = left - sizes.states_of(sizes.num_slots) - sizes.num_slots * sizes.draft_slot_bytes
    most = max(0, for_tokens) // max(1, sizes.token_bytes) if executor.pages else 0
    return PlanReport(
        model=name,
        model_type=model.module.config.model_type,
        dtype=str(model.module.dtype).removeprefix("torch."),
        quantization=describe_weights(model.weights),  # type: ignore[arg-type]  # shapes and dtypes alone are read
        weight_bits=round(8 * model.weights_bytes / model.num_elements, 3),
        topology=request.topology,
        num_devices=math.prod(mesh.values()),
        num_replicas=num_replicas,
        mesh=mesh,
        max_model_len=sizes.max_len,
        max_num_seqs=sizes.num_slots,
        page_size=sizes.page_size,
        kv_cache_dtype=str(executor.pages[0].dtype) if executor.pages else "none",
        executor=executor.name,
        fallback_reason=executor.fallback_reason,
        fits=fits,
        memory_bytes=chip.memory_bytes,
        weights_bytes=weights,
        weights_bytes_of_one_device=model.weights_bytes,
        pages_bytes=pages,
        pages_bytes_wanted=wanted,
        states_bytes=sizes.states_of(sizes.num_slots),
        temporary_bytes=temporary,
        token_bytes=sizes.token_bytes,
        num_pages=max((group.num_pages for group in cache.groups), default=0) if cache else 0,
        num_tokens=cache.num_tokens if cache is not None and cache.groups else 0,
        most_tokens=most,
        most_slots=max(0, int(sizes.slots_in(left))) if sizes.wanted_bytes else sizes.num_slots,
        remedies=() if fits else _remedies(sizes, temporary, out_of_memory),
        programs=programs,
        bounds=bounds,
    )


def _remedies(sizes: CacheSizes, temporary: int, out_of_memory: str | None) -> tuple[str, ...]:
    """Describes how many bytes are missing, and which requests, weights or devices would fit."""
    weights, memory = sizes.weights_bytes, sizes.chip.memory_bytes
    need = weights + sizes.wanted_bytes + temporary
    remedies = [f"{need / 1e9:.2f} GB are needed on each device, {(need - memory) / 1e9:.2f} GB more than it has"]
    if out_of_memory is not None:
        remedies = [out_of_memory]
    left = memory - weights - temporary
    if left > sizes.bytes_of(1):
        slots = min(sizes.num_slots - 1, int(sizes.slots_in(left)))
        if slots >= 1:
            remedies.append(f"{slots} slots of {sizes.max_len} tokens")
        length = int(sizes.max_len * slots / sizes.num_slots) // sizes.page_size * sizes.page_size
        if length >= sizes.page_size:
            remedies.append(f"{sizes.num_slots} slots of about {length} tokens")
    if not sizes.model.forms:
        for preset, part in _PARTS_OF_BFLOAT16.items():
            of_model = sizes.model.weights_bytes_per_device
            fewer = weights - of_model + int(of_model * part * 2 / sizes.model.itemsize)
            if need - weights + fewer <= memory:
                remedies.append(f"--quantization {preset}: about {fewer / 1e9:.2f} GB of weights on each device")
                break
    devices = sizes.model.sharding.mesh.size
    total_bytes = sizes.model.weights_bytes + (sizes.draft_weights_bytes + sizes.wanted_bytes) * devices
    remedies.append(
        f"about {max(devices + 1, math.ceil(total_bytes / (memory * 0.95)))} devices of this kind, in one mesh"
    )
    return tuple(remedies)
