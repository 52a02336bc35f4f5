"""Chooses the executor of a model in a plan: its cache layout and abstract steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from model_adapters.caches.packed_batch import NotPackableError, Pool, ScaledPool, laid_out
from model_adapters.errors import UnsupportedModelError
from model_adapters.ops.kv_pool import LARGEST
from model_adapters.sharding.model_sharding import ModelSharding
from torchax_serve.executors.base import AbstractStep
from torchax_serve.executors.dense.static_batch_steps import StaticBatchSteps
from torchax_serve.executors.packed.executor import PackedExecutor
from torchax_serve.executors.packed.probes import packed_shapes, recurrent_layers
from torchax_serve.executors.per_sequence.factory import PerSequenceFactory, wanted_block_len
from torchax_serve.executors.per_sequence.forward import SequenceForward
from torchax_serve.kv_cache.cache_layout import SlotStateSpec
from torchax_serve.kv_cache.hybrid_cache import HybridCache, RecurrentLayers
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.kv_cache.pools import CacheAllocation, HeadScales, PagedCache, PagedLayerSpec, PoolAllocator
from torchax_serve.kv_cache.slot_states import PagedCacheWithStates
from torchax_serve.planning.topology import bytes_in_memory
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler import SpeculativeConfig

Steps = Callable[[CacheAllocation, int, Sequence[int]], Iterator[AbstractStep]]


@dataclasses.dataclass(frozen=True)
class PlannedExecutor:
    """Executor of a model before its cache is sized.

    Attributes:
        name: Name as ``EngineStats`` and docs/models.md have it.
        sharding: Sharding of the model on the mesh.
        pages: Paged cache of each layer.
        slot_states: States of fixed size that a request has.
        fallback_reason: Why the model does not run on a faster executor; None for the first one.
        steps: Returns the decode step, a verify step if the engine speculates, then a prefill step for each of the
            lengths in tokens, for an allocation of the pages and a number of slots.
        row_capacity: Number of tokens that a row of a static batch has room for; None for pages of any size.
    """

    name: Literal["packed", "per-sequence", "static"]
    sharding: ModelSharding
    pages: tuple[PagedLayerSpec, ...]
    slot_states: tuple[SlotStateSpec, ...]
    fallback_reason: str | None
    steps: Steps
    row_capacity: int | None = None

    @property
    def num_spare(self) -> int:
        """Number of pages and states reserved for padding to write to."""
        return 0 if self.name == "static" else 1

    def row_bytes(self, row: SlotStateSpec) -> int:
        """Returns the bytes of the numbers of one state of a request on one device."""
        if self.name == "static":
            return row.num_bytes
        return math.prod(self._shape_of(row, 1)) * row.dtype.itemsize

    def bytes_of_rows(self, row: SlotStateSpec, num_rows: int) -> int:
        """Returns the bytes that one state of each of `num_rows` requests takes on one device."""
        return bytes_in_memory(self._shape_of(row, num_rows), row.dtype, self.sharding.mesh.devices.flat[0])

    def _shape_of(self, row: SlotStateSpec, num_rows: int) -> tuple[int, ...]:
        shape = (num_rows, *row.shape)
        if self.name == "static":  # each device has all of it
            return shape
        of_shape = self.sharding.recurrent_sharding if row.is_of_heads else self.sharding.state_sharding
        return of_shape(shape).shard_shape(shape)  # channels or heads are sharded if they divide


class AbstractPages(PoolAllocator):
    """Allocates pools and states as shapes without values, with the shardings of an engine."""

    def __init__(self, sharding: ModelSharding) -> None:
        super().__init__(sharding.pool_sharding, sharding.state_sharding)
        self._model_sharding = sharding

    def zeros(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> Any:
        """Returns the shape of a pool ``[num_pages, num_heads, page_size, width]``."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._model_sharding.pool_sharding(shape[1]))

    def pool(self, shape: tuple[int, int, int, int], dtype: np.dtype, scales: HeadScales | None) -> Pool:
        """Returns the shape of a pool; with scales of keys and values by head for 8 bits."""
        pages, by_head = self.zeros(shape, dtype), jax.ShapeDtypeStruct((shape[1],), np.dtype(np.float32))
        if str(dtype) not in LARGEST:
            return pages
        return laid_out(ScaledPool(pages, by_head, by_head), self._model_sharding.pool_sharding, _with_sharding)  # type: ignore[arg-type]

    def slot_states(self, shape: tuple[int, ...], dtype: np.dtype, *, is_of_heads: bool = False) -> Any:
        """Returns the shape of a state for each slot ``[num_slots + 1, ...]``."""
        of_shape = self._model_sharding.recurrent_sharding if is_of_heads else self._model_sharding.state_sharding
        return jax.ShapeDtypeStruct(shape, dtype, sharding=of_shape(shape))


def _with_sharding(shape: Any, sharding: jax.sharding.NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def planned_executor(
    runtime: ModelRuntime,
    sharding: ModelSharding,
    page_size: int,
    max_len: int,
    num_slots: int,
    speculative: SpeculativeConfig | None = None,
) -> PlannedExecutor:
    """Returns the first of packed, per-sequence and static that supports the model, by tracing.

    With options of speculation its steps have a verify step, if it is packed.

    Raises:
        UnsupportedModelError: No executor supports the model; with the reasons.
    """
    sizes = MemoryBudget(max_len, num_slots, page_size, num_slots, None, speculative=speculative)
    try:
        return _packed(runtime, sharding, sizes)
    except NotPackableError as reason:
        fallback_reason = f"not packed: {reason}"
    try:
        return _per_sequence(runtime, sharding, fallback_reason)
    except UnsupportedModelError as reason:
        fallback_reason += f"; not per-sequence: {reason}"
    return _static(runtime, sharding, max_len, num_slots, fallback_reason)


def _packed(runtime: ModelRuntime, sharding: ModelSharding, sizes: MemoryBudget) -> PlannedExecutor:
    recurrent: RecurrentLayers | None = None
    if runtime.cache_support.is_recurrent and not runtime.cache_support.is_compressed:
        shapes, recurrent = recurrent_layers(runtime, sizes)
    else:
        shapes = packed_shapes(runtime, sizes)

    def cache(plan: CacheAllocation, num_slots: int) -> PagedCache:
        pages = AbstractPages(sharding)
        return PagedCache(plan, pages) if recurrent is None else HybridCache(plan, recurrent, num_slots, pages=pages)

    def steps(plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[AbstractStep]:
        of_model = dataclasses.replace(plan, shapes=plan.shapes[: len(shapes)])  # a draft head has a layer behind them
        executor = PackedExecutor(
            runtime.program,
            runtime.weights,
            cache(of_model, num_slots),
            runtime.steps.executables,
            num_slots=num_slots,
            token_budget=max(lens, default=num_slots),
            speculative=sizes.speculative,
        )
        return executor.abstract_steps(lens)

    states = () if recurrent is None else recurrent.states
    return PlannedExecutor("packed", sharding, shapes, states, None, steps)


def _per_sequence(runtime: ModelRuntime, sharding: ModelSharding, fallback_reason: str) -> PlannedExecutor:
    forward = SequenceForward(runtime)
    layout = forward.layout()

    def steps(plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[AbstractStep]:
        sizes = MemoryBudget(plan.max_len, num_slots, plan.page_size, max(lens, default=1), None)
        parts = PerSequenceFactory(runtime, forward, layout, sizes, None)
        cache = PagedCacheWithStates(plan, layout, num_slots, AbstractPages(sharding))
        return parts.model(cache, wanted_block_len(layout)).abstract_steps(lens)

    return PlannedExecutor("per-sequence", sharding, layout.pages, layout.rows, fallback_reason, steps)


def _static(
    runtime: ModelRuntime, sharding: ModelSharding, max_len: int, num_slots: int, fallback_reason: str
) -> PlannedExecutor:
    try:
        batch = StaticBatchSteps.traced(runtime, num_slots, max_len)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; {fallback_reason}") from error
    if batch.states is None:
        fallback_reason += f"; without a cache: {runtime.cache_support.unsupported_reason}"

    def steps(plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[AbstractStep]:
        return dataclasses.replace(batch, num_rows=num_slots).abstract_steps(lens, plan.max_len)

    return PlannedExecutor(
        "static", sharding, batch.pages, batch.slot_states, fallback_reason, steps, row_capacity=batch.capacity
    )
