"""The plan of a model on a topology: does it fit, what it exchanges, what bounds its speed.

Everything is taken from the compiled steps themselves: XLA's compilers for TPUs and GPUs need a description of the
devices and not the devices. Weights are never made, only their shapes.
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
from torchax_serve.distributed.mesh import mesh_of
from torchax_serve.distributed.mesh_shape import parse_mesh
from torchax_serve.kv_cache.pools import CacheAllocation
from torchax_serve.planning.abstract_model import abstract_model
from torchax_serve.planning.cache_sizes import CacheSizes
from torchax_serve.planning.compiled_steps import ProgramReport, compile_step
from torchax_serve.planning.executors import PlannedExecutor, choose_executor
from torchax_serve.planning.roofline import StepBound, bound_of
from torchax_serve.planning.topology import compiling_for, describe
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler.config import check_whole

MOST_TOLD_S = 0.5
"""Of a step by its bound; where the compiler's sum is told modulo a second, that of a longer one may be wrong."""
KV_DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZED = ("int8", "int4", "fp8", "float8_e4m3fn", "float8_e5m2")


Note = Callable[[str], None]
"""Told in words what is being done."""


def no_note(text: str) -> None:
    """Tells nobody."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked.

    Attributes:
        topology: such as ``v6e:2x4`` or ``h200:8``.
        mesh: such as ``data=2,model=4``; None: all devices on ``model``.
        max_model_len: tokens of a request, prompt and answer; None: the model's own limit, 8192 at the most.
        max_num_seqs: requests at once, of all replicas together.
        page_size: tokens of a page.
        prefill_lens: tokens of the prefill steps to compile.
        kv_cache_dtype: of pages; "auto" is that of the weights.
        refuse_uneven: an error for what would have to be padded with zeros.
    """

    topology: str
    mesh: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    page_size: int = 64
    prefill_lens: tuple[int, ...] = (1024,)
    kv_cache_dtype: str = "auto"
    refuse_uneven: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "page_size"):
            check_whole(name, getattr(self, name), 1, "give a positive number")
        if self.max_model_len is not None:
            check_whole("max_model_len", self.max_model_len, 2, "a request has a token of prompt and a new one")
        for length in self.prefill_lens:
            check_whole("prefill", length, 1, "give positive numbers")
        if self.kv_cache_dtype in QUANTIZED:
            raise UnsupportedArgumentError(
                f"kv_cache_dtype: expected one of {', '.join(KV_DTYPES)}, got {self.kv_cache_dtype!r}, which the "
                "engine's steps cannot use yet; leave it out"
            )
        if self.kv_cache_dtype not in KV_DTYPES:
            raise InvalidArgumentError(
                f"kv_cache_dtype: expected one of {', '.join(KV_DTYPES)}, got {self.kv_cache_dtype!r}; choose one"
            )


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """What came out, in bytes of one device where nothing else is said."""

    model: str
    model_type: str
    dtype: str
    topology: str
    num_devices: int
    num_replicas: int
    mesh: Mapping[str, int]
    max_model_len: int
    max_num_seqs: int  # of one replica
    page_size: int
    kv_cache_dtype: str
    road: str  # as the engine chooses it: packed or gathered; generate where neither can be
    why: str | None  # not the road before
    fits: bool
    memory_bytes: int
    weights_bytes: int
    weights_bytes_of_one_device: int  # were there only one
    pages_bytes: int
    pages_bytes_wanted: int  # for all slots at full length
    states_bytes: int  # that all slots keep as a whole
    temporary_bytes: int
    token_bytes: int  # of cache, for one more token
    num_pages: int  # of one replica, in the group of layers with the most
    num_tokens: int  # that the pages hold
    most_tokens: int  # that would fit into what weights, states and steps leave
    most_slots: int  # requests of full length that would fit into what weights and steps leave
    remedies: tuple[str, ...]
    programs: tuple[ProgramReport, ...]
    bounds: tuple[StepBound, ...]

    @property
    def total_bytes(self) -> int:
        """Weights, pages, states and temporaries, as wanted."""
        return self.weights_bytes + self.pages_bytes_wanted + self.states_bytes + self.temporary_bytes

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PlanReport:
        """Out of what `to_json` made."""
        fields = dict(content)
        fields.pop("total_bytes")
        programs = tuple(
            ProgramReport(**{**each, "collectives": {k: (v[0], v[1]) for k, v in each["collectives"].items()}})
            for each in fields.pop("programs")
        )
        bounds = tuple(StepBound(**each) for each in fields.pop("bounds"))
        fields["remedies"] = tuple(fields["remedies"])
        return cls(**fields, programs=programs, bounds=bounds)


def make_plan(
    module: PreTrainedModel, name: str, request: PlanRequest, *, save: Path | None = None, note: Note = no_note
) -> PlanReport:
    """Lays `module` out, compiles its steps and says what they need.

    Args:
        module: on the meta device.
        name: of the model, for people.
        request: what is asked.
        save: a folder for the compiled programs.
        note: told what is being done, before each part that may take a while.

    Raises:
        TorchaxServeError: a topology, mesh or model that cannot be planned; says why.
    """
    chip, devices = describe(request.topology)
    shape = parse_mesh(request.mesh, len(devices))
    num_replicas = shape["data"]
    per_replica = shape | {"data": 1}
    mesh = mesh_of(devices[: math.prod(per_replica.values())], per_replica)
    model = abstract_model(module, mesh, refuse_uneven=request.refuse_uneven)
    runtime = ModelRuntime(module, model.weights, sharding=model.sharding)  # type: ignore[arg-type]
    max_len = _max_len(runtime, request)
    num_slots = -(-request.max_num_seqs // num_replicas)
    note(f"tracing {name} for {request.topology}")
    with compiling_for(chip):
        road = _with_dtype(choose_executor(runtime, model.sharding, request.page_size, max_len, num_slots), request)
    sizes = CacheSizes(model, chip, road, road.page_size(request.page_size, max_len), max_len, num_slots)
    programs: list[ProgramReport] = []
    bounds: list[StepBound] = []
    cache, why_not = sizes.plan(), None
    if cache is not None:
        lens = sorted({min(length, max_len) for length in request.prefill_lens})
        try:
            for step in road.steps(*cache, lens):
                note(f"compiling {step.name} of {step.num_tokens} tokens for {request.topology}")
                report, compiled = compile_step(step, model, chip)
                if save is not None:
                    _save(save, f"{step.name}-{step.num_tokens}", compiled)
                del compiled  # hundreds of megabytes where there are many layers,
                gc.collect()
                give_back_freed()  # and a compiler's scratch of half a gigabyte, which the C library would keep
                bounds.append(bound_of(model, chip, road, step))
                if report.num_opaque and (bounds[-1].seconds or 0) > MOST_TOLD_S:
                    report = dataclasses.replace(report, compiler_s=None)
                programs.append(report)
        except OutOfMemoryError as error:
            why_not = str(error)
    plan = None if cache is None else cache[0]
    return _report(name, request, sizes, plan, num_replicas, tuple(programs), tuple(bounds), why_not)


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


def _with_dtype(road: PlannedExecutor, request: PlanRequest) -> PlannedExecutor:
    """`road` with pages of the dtype that is asked for."""
    if request.kv_cache_dtype == "auto":
        return road
    dtype = np.dtype(jnp.dtype(request.kv_cache_dtype))
    if road.why is not None and any(shape.dtype != dtype for shape in road.pages):
        raise UnsupportedArgumentError(
            f"kv_cache_dtype: expected 'auto' for a model that is not packed, got {request.kv_cache_dtype!r}; leave it "
            "out"
        )
    return dataclasses.replace(road, pages=tuple(dataclasses.replace(shape, dtype=dtype) for shape in road.pages))


def _save(folder: Path, name: str, program: Any) -> None:
    """Writes what `jax.experimental.serialize_executable` loads on a machine of that topology, pickled."""
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
    why_not: str | None,
) -> PlanReport:
    model, chip, road = sizes.model, sizes.chip, sizes.road
    weights = model.weights_bytes_per_device
    temporary = max((p.temporary_bytes + p.code_bytes for p in programs), default=0)
    pages = 0
    if cache is not None:
        pages = sum(group.num_pages * sizes.group_bytes(group.window) for group in cache.groups)
    left = chip.memory_bytes - weights - temporary
    wanted = sizes.pages_of(sizes.num_slots)
    fits = why_not is None and cache is not None and sizes.wanted_bytes <= left and pages >= wanted
    mesh = model.mesh_shape | {"data": num_replicas}
    most = max(0, left - sizes.states_of(sizes.num_slots)) // max(1, sizes.token_bytes) if road.pages else 0
    return PlanReport(
        model=name,
        model_type=model.module.config.model_type,
        dtype=str(model.module.dtype).removeprefix("torch."),
        topology=request.topology,
        num_devices=math.prod(mesh.values()),
        num_replicas=num_replicas,
        mesh=mesh,
        max_model_len=sizes.max_len,
        max_num_seqs=sizes.num_slots,
        page_size=sizes.page_size,
        kv_cache_dtype=str(road.pages[0].dtype) if road.pages else "none",
        road=road.name,
        why=road.why,
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
        remedies=() if fits else _remedies(sizes, temporary, why_not),
        programs=programs,
        bounds=bounds,
    )


def _remedies(sizes: CacheSizes, temporary: int, why_not: str | None) -> tuple[str, ...]:
    """By how much it does not fit, and what would."""
    weights, memory = sizes.model.weights_bytes_per_device, sizes.chip.memory_bytes
    need = weights + sizes.wanted_bytes + temporary
    said = [f"{need / 1e9:.2f} GB are needed on each device, {(need - memory) / 1e9:.2f} GB more than it has"]
    if why_not is not None:
        said = [why_not]
    left = memory - weights - temporary
    if left > sizes.bytes_of(1):
        slots = min(sizes.num_slots - 1, int(sizes.slots_in(left)))
        if slots >= 1:
            said.append(f"{slots} slots of {sizes.max_len} tokens")
        length = int(sizes.max_len * slots / sizes.num_slots) // sizes.page_size * sizes.page_size
        if length >= sizes.page_size:
            said.append(f"{sizes.num_slots} slots of about {length} tokens")
    eight_bits = weights // sizes.model.itemsize
    if eight_bits < weights and need - weights + eight_bits <= memory:
        said.append(f"weights of 8 bits, {eight_bits / 1e9:.2f} GB on each device; they cannot be served here yet")
    devices = sizes.model.sharding.mesh.size
    whole = sizes.model.weights_bytes + sizes.wanted_bytes * devices
    said.append(f"about {max(devices + 1, math.ceil(whole / (memory * 0.95)))} devices of this kind, in one mesh")
    return tuple(said)
