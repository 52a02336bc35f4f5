"""The plan of a model on a topology: does it fit, what it exchanges, what bounds its speed.

Everything is taken from the compiled steps themselves: XLA's compilers for TPUs and GPUs need a description of the
devices and not the devices. Weights are never made, only their shapes.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError, OutOfMemoryError, UnsupportedArgumentError
from torchax_serve.engine.cache import CachePlan, PageShape
from torchax_serve.engine.packed_road import page_shapes
from torchax_serve.meshes import mesh_of, parse_mesh
from torchax_serve.planning.abstract import AbstractModel, abstract_model
from torchax_serve.planning.bounds import Bound, decode_bound, prefill_bound
from torchax_serve.planning.chips import Chip
from torchax_serve.planning.programs import Planner, ProgramReport, Step
from torchax_serve.planning.topology import compiling_for, describe
from torchax_serve.runtime import Runtime
from torchax_serve.scheduling import CacheGroup
from torchax_serve.scheduling.config import check_whole

RESERVE = 0.02
"""Part of a device's memory kept for a program's temporaries before the compiler has said what they are."""
KV_DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZED = ("int8", "int4", "fp8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked.

    Attributes:
        topology: such as ``v6e:2x4`` or ``h200:8``.
        mesh: such as ``data=2,model=4``; None: all devices on ``model``.
        max_len: tokens of a request, prompt and answer; None: the model's own limit, 8192 at the most.
        num_slots: requests at once, of all replicas together.
        page_len: tokens of a page.
        prefill_lens: tokens of the prefill steps to compile.
        kv_cache_dtype: of pages; "auto" is that of the weights.
        refuse_uneven: an error for what would have to be padded with zeros.
    """

    topology: str
    mesh: str | None = None
    max_len: int | None = None
    num_slots: int = 64
    page_len: int = 64
    prefill_lens: tuple[int, ...] = (1024,)
    kv_cache_dtype: str = "auto"
    refuse_uneven: bool = False

    def __post_init__(self) -> None:
        for name in ("num_slots", "page_len"):
            check_whole(name, getattr(self, name), 1, "give a positive number")
        if self.max_len is not None:
            check_whole("max_len", self.max_len, 2, "a request has a token of prompt and a new one")
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
    max_len: int
    num_slots: int  # of one replica
    page_len: int
    kv_cache_dtype: str
    fits: bool
    memory_bytes: int
    weights_bytes: int
    weights_bytes_of_one_device: int  # were there only one
    pages_bytes: int
    pages_bytes_wanted: int  # for all slots at full length
    temporary_bytes: int
    token_bytes: int  # of cache, for one more token
    num_pages: int  # of one replica, in the group of layers with the most
    num_tokens: int  # that the pages hold
    most_tokens: int  # that would fit into what weights and steps leave
    remedies: tuple[str, ...]
    programs: tuple[ProgramReport, ...]
    bounds: tuple[Bound, ...]

    @property
    def total_bytes(self) -> int:
        """Weights, pages and temporaries, as wanted."""
        return self.weights_bytes + self.pages_bytes_wanted + self.temporary_bytes

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
        bounds = tuple(Bound(**each) for each in fields.pop("bounds"))
        fields["remedies"] = tuple(fields["remedies"])
        return cls(**fields, programs=programs, bounds=bounds)


def make_plan(module: PreTrainedModel, name: str, request: PlanRequest, *, save: Path | None = None) -> PlanReport:
    """Lays `module` out, compiles its steps and says what they need.

    Args:
        module: on the meta device.
        name: of the model, for people.
        request: what is asked.
        save: a folder for the compiled programs.

    Raises:
        TorchaxServeError: a topology, mesh or model that cannot be planned; says why.
    """
    chip, devices = describe(request.topology)
    shape = parse_mesh(request.mesh, len(devices))
    num_replicas = shape["data"]
    per_replica = shape | {"data": 1}
    mesh = mesh_of(devices[: math.prod(per_replica.values())], per_replica)
    model = abstract_model(module, mesh, refuse_uneven=request.refuse_uneven)
    runtime = Runtime(module, model.weights, sharding=model.sharding)  # type: ignore[arg-type]
    max_len = _max_len(runtime, request)
    num_slots = -(-request.num_slots // num_replicas)
    with compiling_for(chip, mesh):
        shapes = _page_shapes(runtime, request)
    sizes = _Sizes(model, chip, shapes, request.page_len, max_len, num_slots)
    programs: list[ProgramReport] = []
    cache, compiled, why_not = sizes.plan(), {}, None
    if cache is not None:
        planner = Planner(model, chip, cache, runtime)
        try:
            for step in _steps(request, num_slots, max_len):
                report, compiled[f"{step.name}-{step.num_tokens}"] = planner.compile(step)
                programs.append(report)
        except OutOfMemoryError as error:
            why_not = str(error)
    if save is not None:
        _save(save, compiled)
    return _report(name, request, sizes, cache, num_replicas, tuple(programs), why_not)


def _max_len(runtime: Runtime, request: PlanRequest) -> int:
    limit = runtime.max_positions
    if request.max_len is None:
        return min(8192, limit or 8192)
    if runtime.learned_positions is not None and request.max_len > runtime.learned_positions:
        raise InvalidArgumentError(
            f"max_len: expected at most {runtime.learned_positions}, the positions this model has, got "
            f"{request.max_len}; lower it"
        )
    return request.max_len


def _page_shapes(runtime: Runtime, request: PlanRequest) -> tuple[PageShape, ...]:
    shapes = page_shapes(runtime)
    if request.kv_cache_dtype == "auto":
        return shapes
    dtype = np.dtype(jnp.dtype(request.kv_cache_dtype))
    return tuple(dataclasses.replace(shape, dtype=dtype) for shape in shapes)


def _steps(request: PlanRequest, num_slots: int, max_len: int) -> list[Step]:
    steps = [Step("decode", num_slots, num_slots)]
    for length in sorted({min(length, max_len) for length in request.prefill_lens}):
        steps.append(Step("prefill", length, min(num_slots, 4)))
    return steps


def _save(folder: Path, programs: Mapping[str, Any]) -> None:
    """Writes what `jax.experimental.serialize_executable` loads on a machine of that topology, pickled."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, program in programs.items():
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(serialize_executable.serialize(program)))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What is known before anything is compiled."""

    model: AbstractModel
    chip: Chip
    shapes: tuple[PageShape, ...]
    page_len: int
    max_len: int
    num_slots: int

    def page_bytes(self, shape: PageShape) -> int:
        """Bytes of a page of one layer on one device."""
        sharding = self.model.sharding
        spec = sharding.pool_sharding(shape.num_heads).spec
        parts = sharding.mesh.shape["model"] if "model" in spec else 1
        return shape.page_bytes(self.page_len) // parts

    def windows(self) -> list[int | None]:
        """One for each group of layers that share pages."""
        return sorted({shape.window for shape in self.shapes}, key=lambda window: (window is not None, window or 0))

    def group_bytes(self, window: int | None) -> int:
        """Bytes of a page in all layers of a group."""
        return sum(self.page_bytes(shape) for shape in self.shapes if shape.window == window)

    def pages_per_seq(self, window: int | None) -> int:
        """Pages that a request of full length holds."""
        return CacheGroup("", window, 2).most_pages(self.max_len, self.page_len)

    def bytes_of(self, slots: float) -> int:
        """Bytes of the pages of so many requests of full length, null pages included."""
        return sum(
            (math.ceil(slots * self.pages_per_seq(window)) + 1) * self.group_bytes(window) for window in self.windows()
        )

    @property
    def wanted_bytes(self) -> int:
        """Bytes of the pages of all slots at full length."""
        return self.bytes_of(self.num_slots)

    @property
    def token_bytes(self) -> int:
        """Bytes of one more token in the layers that keep all of them."""
        kept = [shape for shape in self.shapes if shape.window is None] or list(self.shapes)
        return sum(self.page_bytes(shape) for shape in kept) // self.page_len

    def plan(self) -> CachePlan | None:
        """Pages for all slots, or as many as there is room for; None: not even for one request."""
        room = int(self.chip.memory_bytes * (1 - RESERVE)) - self.model.weights_bytes_per_device
        slots: float = self.num_slots
        if self.bytes_of(slots) > room:
            unit = max(1, self.bytes_of(2) - self.bytes_of(1))
            slots = (room - self.bytes_of(0)) / unit
            if slots < 1:
                return None
        groups = tuple(
            CacheGroup(
                "full attention" if window is None else f"window of {window}",
                window,
                max(2, int(slots * self.pages_per_seq(window)) + 1),
            )
            for window in self.windows()
        )
        return CachePlan(self.shapes, groups, self.page_len, self.max_len)


def _report(
    name: str,
    request: PlanRequest,
    sizes: _Sizes,
    cache: CachePlan | None,
    num_replicas: int,
    programs: tuple[ProgramReport, ...],
    why_not: str | None,
) -> PlanReport:
    model, chip = sizes.model, sizes.chip
    weights = model.weights_bytes_per_device
    temporary = max((p.temporary_bytes + p.code_bytes for p in programs), default=0)
    pages = 0
    if cache is not None:
        pages = sum(group.num_pages * sizes.group_bytes(group.window) for group in cache.groups)
    left = chip.memory_bytes - weights - temporary
    fits = why_not is None and cache is not None and sizes.wanted_bytes <= left and pages >= sizes.wanted_bytes
    mesh = model.mesh_shape | {"data": num_replicas}
    most = max(0, left) // max(1, sizes.token_bytes) if sizes.shapes else 0
    return PlanReport(
        model=name,
        model_type=model.module.config.model_type,
        dtype=str(model.module.dtype).removeprefix("torch."),
        topology=request.topology,
        num_devices=math.prod(mesh.values()),
        num_replicas=num_replicas,
        mesh=mesh,
        max_len=sizes.max_len,
        num_slots=sizes.num_slots,
        page_len=sizes.page_len,
        kv_cache_dtype=str(sizes.shapes[0].dtype) if sizes.shapes else "none",
        fits=fits,
        memory_bytes=chip.memory_bytes,
        weights_bytes=weights,
        weights_bytes_of_one_device=model.weights_bytes,
        pages_bytes=pages,
        pages_bytes_wanted=sizes.wanted_bytes,
        temporary_bytes=temporary,
        token_bytes=sizes.token_bytes,
        num_pages=max((group.num_pages for group in cache.groups), default=0) if cache else 0,
        num_tokens=cache.num_tokens if cache is not None and cache.groups else 0,
        most_tokens=most,
        remedies=() if fits else _remedies(sizes, temporary, why_not),
        programs=programs,
        bounds=tuple(
            decode_bound(model, chip, sizes.shapes, p.num_tokens, sizes.max_len)
            if p.name == "decode"
            else prefill_bound(model, chip, sizes.shapes, p.num_tokens)
            for p in programs
        ),
    )


def _remedies(sizes: _Sizes, temporary: int, why_not: str | None) -> tuple[str, ...]:
    """By how much it does not fit, and what would."""
    weights, memory = sizes.model.weights_bytes_per_device, sizes.chip.memory_bytes
    need = weights + sizes.wanted_bytes + temporary
    said = [f"{need / 1e9:.2f} GB are needed on each device, {(need - memory) / 1e9:.2f} GB more than it has"]
    if why_not is not None:
        said = [why_not]
    left = memory - weights - temporary
    if left > sizes.bytes_of(1):
        unit = sizes.bytes_of(2) - sizes.bytes_of(1)
        slots = min(sizes.num_slots - 1, int((left - sizes.bytes_of(0)) / unit))
        if slots >= 1:
            said.append(f"{slots} slots of {sizes.max_len} tokens")
        length = int(sizes.max_len * slots / sizes.num_slots) // sizes.page_len * sizes.page_len
        if length >= sizes.page_len:
            said.append(f"{sizes.num_slots} slots of about {length} tokens")
    devices = sizes.model.sharding.mesh.size
    whole = sizes.model.weights_bytes + sizes.wanted_bytes * devices
    said.append(f"about {max(devices + 1, math.ceil(whole / (memory * 0.95)))} devices of this kind, in one mesh")
    return tuple(said)
