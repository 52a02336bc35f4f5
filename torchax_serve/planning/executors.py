"""Executors of a plan: the cache layout of a model, and its steps with shapes as arguments."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.layers import AttentionLayer
from model_adapters.caches.paged_cache import NotPackableError, PackedBatch
from model_adapters.errors import TorchaxServeError, UnsupportedModelError
from model_adapters.program.model_program import CallSpec
from model_adapters.program.packed_forward import forward_packed
from model_adapters.sharding.model_sharding import ModelSharding
from torchax_serve.buckets import next_bucket
from torchax_serve.executors.packed_factory import packed_shapes
from torchax_serve.executors.per_sequence_factory import PerSequenceFactory
from torchax_serve.executors.per_sequence_forward import SequenceForward
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.kv_cache.pools import CacheAllocation, PagedLayerSpec, PoolAllocator
from torchax_serve.kv_cache.slot_states import PagedCacheWithStates
from torchax_serve.kv_cache.state_layout import CacheLayout, SlotStateSpec
from torchax_serve.planning.compiled_steps import Step
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.runtime.step_functions import BatchPosition, DecodeSpec


@dataclasses.dataclass(frozen=True)
class PlannedExecutor(abc.ABC):
    """Abstract executor of a model: its cache layout and its steps.

    Attributes:
        runtime: Runtime of the model; its weights are shapes.
        sharding: Sharding of the model on the mesh.
        pages: Paged cache of each layer.
        slot_states: States of fixed size that a request has.
        fallback_reason: Why the model does not run on a faster executor; None for the first one.
    """

    runtime: ModelRuntime
    sharding: ModelSharding
    pages: tuple[PagedLayerSpec, ...]
    slot_states: tuple[SlotStateSpec, ...]
    fallback_reason: str | None

    name = ""
    num_spare = 1
    """Number of pages and states reserved for padding to write to."""

    @abc.abstractmethod
    def steps(self, plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """Yields the decode step, then a prefill step for each of `lens`.

        Args:
            plan: Allocation of the pages.
            num_slots: Number of requests that fit.
            lens: Numbers of tokens of the prefill steps.
        """

    def page_size(self, requested: int, max_len: int) -> int:
        """Returns the number of tokens in a page."""
        return requested

    def row_bytes(self, row: SlotStateSpec) -> int:
        """Returns the bytes of one state of a request on one device; each device has all of it."""
        return row.num_bytes

    def integers(self, *shape: int) -> Any:
        """Returns an abstract int32 array of `shape`, replicated on every device."""
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self.sharding.replicated())


class AbstractPages(PoolAllocator):
    """Allocates pools and states as shapes without values, with the shardings of an engine."""

    def __init__(self, sharding: ModelSharding) -> None:
        super().__init__(sharding.pool_sharding, sharding.state_sharding)
        self._model_sharding = sharding

    def zeros(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> Any:
        """Returns the shape of a pool ``[num_pages, num_heads, page_size, width]``."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._model_sharding.pool_sharding(shape[1]))

    def slot_states(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Returns the shape of a state for each slot ``[num_slots + 1, ...]``."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._model_sharding.state_sharding(shape))


PROBE_LEN = 16
"""Number of prompt tokens in the trace that finds the cache of a static batch."""


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Forwards of a static batch, to be traced.

    Attributes:
        runtime: Runtime of the model.
        num_rows: Number of rows in the batch.
        capacity: Number of tokens that a row has room for.
    """

    runtime: ModelRuntime
    num_rows: int
    capacity: int

    def prefill(self, weights: Any, ids: jax.Array, last: jax.Array) -> tuple[jax.Array, Any]:
        """Returns logits [rows, vocab] of the token at index `last` of a prompt, and the cache after it."""
        runtime = self.runtime
        states, offset = None, None
        names = runtime.program.names
        inputs = {names.ids: ids, "last": last}
        if runtime.cache_support.is_supported:
            states, offset = runtime.cache_support.new(self.capacity).states, jnp.int32(0)
            if runtime.program.accepts(
                names.positions
            ):  # without a cache, model code counts them itself, and may read them
                inputs[names.positions] = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        fields, states = runtime.program.forward(weights, states, offset, inputs, CallSpec())
        if "logits" not in fields:
            raise UnsupportedModelError(
                f"expected a model whose forward returns logits, got {', '.join(sorted(fields)) or 'nothing'}"
            )
        return fields["logits"][:, -1], states

    def decode(
        self, weights: Any, states: Any, token: jax.Array, carry: BatchPosition
    ) -> tuple[jax.Array, Any, BatchPosition]:
        """Returns logits [rows, vocab] of the next token, the cache, and the position of the batch."""
        spec = DecodeSpec(CallSpec(), self.runtime.program.accepts(self.runtime.program.names.positions))
        return self.runtime.steps.decode_once(weights, states, token, carry, {}, spec)


@dataclasses.dataclass(frozen=True)
class PlannedStaticBatchExecutor(PlannedExecutor):
    """Static batch of ``generate``: its cache has one page per row; without a cache every step computes all tokens."""

    states: Any  # cache layers after a prompt, leaves are shapes; None without a cache

    name = "static"
    num_spare = 0

    def page_size(self, requested: int, max_len: int) -> int:
        """Returns the number of tokens in a page, which holds all tokens of a row."""
        return next_bucket(max_len)

    def steps(self, plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """Yields the steps of `PlannedExecutor.steps`."""
        batch = _Batch(self.runtime, num_slots, plan.page_size)
        one = self.integers()
        if self.states is None:
            ids = self.integers(num_slots, plan.page_size)
            num_tokens = num_slots * plan.page_size
            yield Step("decode", num_tokens, num_slots, plan.page_size, num_slots, batch.prefill, (ids, one), ())
        else:
            row = self.integers(num_slots)
            args = (self._laid_out(num_slots), row, BatchPosition(row, one, row))
            yield Step("decode", num_slots, num_slots, plan.max_len, 0, batch.decode, args, (0,))
        for length in lens:
            ids = self.integers(num_slots, length)
            yield Step("prefill", num_slots * length, num_slots, length, num_slots, batch.prefill, (ids, one), ())

    def _laid_out(self, num_slots: int) -> Any:
        """Returns the cache of `num_slots` rows: keys and values sharded by heads, all else replicated."""
        pools = {id(leaf) for leaf in _pools(self.states)}

        def place(leaf: Any) -> Any:
            is_pool = id(leaf) in pools
            where = self.sharding.pool_sharding(leaf.shape[1]) if is_pool else self.sharding.replicated()
            return jax.ShapeDtypeStruct((num_slots, *leaf.shape[1:]), leaf.dtype, sharding=where)

        return jax.tree.map(place, self.states)


def static_batch_executor(
    runtime: ModelRuntime, sharding: ModelSharding, max_len: int, num_slots: int, fallback_reason: str
) -> PlannedStaticBatchExecutor:
    """Returns the executor of ``generate``; its cache is found by tracing a prompt.

    Raises:
        UnsupportedModelError: The forward cannot be traced; with the reasons against the other executors.
    """
    capacity = next_bucket(max_len)
    batch = _Batch(runtime, num_slots, capacity)
    ids = jax.ShapeDtypeStruct((num_slots, min(PROBE_LEN, capacity)), np.int32)
    # Model code may raise anything while it is traced.
    try:
        _, states = jax.eval_shape(batch.prefill, runtime.weights, ids, jax.ShapeDtypeStruct((), np.int32))
    except Exception as error:
        text = str(error) if isinstance(error, TorchaxServeError) else f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(
            f"expected a forward that can be traced, got {' '.join(text.split())[:300]}; {fallback_reason}"
        ) from error
    if states is None:
        fallback_reason += f"; without a cache: {runtime.cache_support.unsupported_reason}"
        return PlannedStaticBatchExecutor(runtime, sharding, (), (), fallback_reason, None)
    pools = _pools(states)
    known = {id(leaf) for leaf in pools}
    pages = tuple(PagedLayerSpec(leaf.shape[1], leaf.shape[3], np.dtype(leaf.dtype), None) for leaf in pools)
    slot_states = tuple(
        SlotStateSpec(tuple(leaf.shape[1:]), np.dtype(leaf.dtype))
        for leaf in jax.tree.leaves(states)
        if id(leaf) not in known
    )
    return PlannedStaticBatchExecutor(runtime, sharding, pages, slot_states, fallback_reason, states)


def _pools(states: Any) -> list[Any]:
    """Returns the leaves that hold keys and values ``[rows, heads, capacity, width]``."""
    layers = (layer for layer in states if isinstance(layer, AttentionLayer))
    return [pool for layer in layers for name in layer.POOLS if (pool := getattr(layer, name)) is not None]


class PlannedPackedExecutor(PlannedExecutor):
    """Many sequences packed into one row, on pages."""

    name = "packed"

    def steps(self, plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """Yields the steps of `PlannedExecutor.steps`."""
        yield self._step("decode", plan, num_slots, num_slots)
        for length in lens:
            yield self._step("prefill", plan, length, min(num_slots, 4))

    def _step(self, name: str, plan: CacheAllocation, num_tokens: int, num_rows: int) -> Step:
        is_decode = name == "decode"
        layout = dataclasses.replace(plan.layout, is_decode=is_decode)
        pages, sharded = {group.window: group.num_pages for group in plan.groups}, AbstractPages(self.sharding)
        pools = tuple(
            sharded.zeros((pages[shape.window], shape.num_heads, plan.page_size, shape.width), shape.dtype)
            for shape in plan.shapes
        )
        table = self.integers(num_rows, -(-plan.max_len // plan.page_size))
        batch = PackedBatch(
            token_ids=self.integers(num_tokens),
            positions=self.integers(num_tokens),
            cu_q_lens=self.integers(num_rows + 1),
            kv_lens=self.integers(num_rows),
            last=self.integers(num_rows),
            page_tables=(table,) * len(plan.groups),
            rope_lens=self.integers(num_tokens) if self.runtime.program.rope is not None else None,
        )

        def run(weights: Any, pools: Any, batch: PackedBatch) -> Any:
            return forward_packed(self.runtime.program, weights, pools, batch, layout)

        length = plan.max_len if is_decode else num_tokens
        return Step(name, num_tokens, num_rows, length, 0 if is_decode else 1, run, (pools, batch), (0,))


@dataclasses.dataclass(frozen=True)
class PlannedPerSequenceExecutor(PlannedExecutor):
    """One forward per request, over a cache gathered from its pages, and its states."""

    forward: SequenceForward
    layout: CacheLayout

    name = "per-sequence"

    def row_bytes(self, row: SlotStateSpec) -> int:
        """Returns the bytes of one state of a request on one device; channels or heads are sharded if they divide."""
        sharding = self.sharding.state_sharding((1, *row.shape))
        return math.prod(sharding.shard_shape((1, *row.shape))) * row.dtype.itemsize

    def steps(self, plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """Yields the steps of `PlannedExecutor.steps`; a prefill step is the last chunk of its prompt."""
        sizes = MemoryBudget(plan.max_len, num_slots, plan.page_size, max(lens, default=1), None)
        parts = PerSequenceFactory(self.runtime, self.forward, self.layout, sizes, None)
        cache = PagedCacheWithStates(plan, self.layout, num_slots, AbstractPages(self.sharding))
        model = parts.model(cache, parts.wanted_block_len)
        specs = [("decode", model.shapes.largest_decode())]
        specs += [("prefill", spec) for spec in dict.fromkeys(model.shapes.final_chunk(length) for length in lens)]
        for name, spec in specs:
            run = functools.partial(model.step_function, hidden=None, spec=spec)
            args = (cache.pools, cache.states, self.integers(num_slots), self.integers(sum(spec.sizes)))
            num_tokens, num_prompts = spec.num_rows * spec.num_tokens, 0 if name == "decode" else 1
            yield Step(name, num_tokens, spec.num_rows, plan.max_len, num_prompts, run, args, (0, 1))


def choose_executor(
    runtime: ModelRuntime, sharding: ModelSharding, page_size: int, max_len: int, num_slots: int
) -> PlannedExecutor:
    """Returns the first executor that supports the model, found by tracing: packed, per-sequence, static.

    Raises:
        UnsupportedModelError: No executor supports the model; with the reasons.
    """
    sizes = MemoryBudget(max_len, num_slots, page_size, num_slots, None)
    try:
        return PlannedPackedExecutor(runtime, sharding, packed_shapes(runtime, sizes), (), None)
    except NotPackableError as reason:
        fallback_reason = f"not packed: {reason}"
    try:
        forward = SequenceForward(runtime)
        layout = forward.layout()
        return PlannedPerSequenceExecutor(
            runtime, sharding, layout.pages, layout.rows, fallback_reason, forward, layout
        )
    except UnsupportedModelError as reason:
        fallback_reason += f"; not per-sequence: {reason}"
    return static_batch_executor(runtime, sharding, max_len, num_slots, fallback_reason)
