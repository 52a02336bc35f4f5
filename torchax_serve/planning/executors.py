"""What every road of a plan has: what a request keeps on the device, and steps whose arguments are shapes."""

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
    """How a model would be run.

    Attributes:
        runtime: of the model, weights without values.
        sharding: how it lies on the mesh.
        pages: what each layer keeps of a token.
        rows: what a request keeps as a whole.
        why: what stands against the roads that are tried before; None for the first one.
    """

    runtime: ModelRuntime
    sharding: ModelSharding
    pages: tuple[PagedLayerSpec, ...]
    rows: tuple[SlotStateSpec, ...]
    why: str | None

    name = ""
    num_spare = 1
    """Pages and states that nobody has, for padding to write to."""

    @abc.abstractmethod
    def steps(self, plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """The decode step first, then a step for each of `lens` tokens of a prompt.

        Args:
            plan: of the pages.
            num_slots: requests that there is room for.
            lens: of prefill steps.
        """

    def page_size(self, asked: int, max_len: int) -> int:
        """Tokens of a page."""
        return asked

    def row_bytes(self, row: SlotStateSpec) -> int:
        """Bytes on one device of what a request keeps as a whole: each device has all of it."""
        return row.num_bytes

    def integers(self, *shape: int) -> Any:
        """Numbers that every device has."""
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self.sharding.replicated())


class AbstractPages(PoolAllocator):
    """Pools and states that are shapes alone, laid out as those of an engine."""

    def __init__(self, sharding: ModelSharding) -> None:
        super().__init__(sharding.pool_sharding, sharding.state_sharding)
        self._model_sharding = sharding

    def zeros(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> Any:
        """As `PoolAllocator.zeros`."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._model_sharding.pool_sharding(shape[1]))

    def rows(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """As `PoolAllocator.slot_states`."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._model_sharding.state_sharding(shape))


SHORTEST = 16


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Forwards of `num_rows` rows, to be traced.

    Attributes:
        runtime: of the model.
        num_rows: of the batch.
        capacity: tokens that a row has room for.
    """

    runtime: ModelRuntime
    num_rows: int
    capacity: int

    def prefill(self, weights: Any, ids: jax.Array, last: jax.Array) -> tuple[jax.Array, Any]:
        """Logits [rows, vocab] of the token `last` of a prompt, and the cache behind it."""
        runtime = self.runtime
        states, offset = None, None
        names = runtime.program.names
        inputs = {names.ids: ids, "last": last}
        if runtime.cache_support.is_supported:
            states, offset = runtime.cache_support.new(self.capacity).states, jnp.int32(0)
            if runtime.program.accepts(names.positions):  # without a cache code counts them itself, and may read them
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
        """Logits [rows, vocab] of the next token, the cache, and where the batch stands."""
        spec = DecodeSpec(CallSpec(), self.runtime.program.accepts(self.runtime.program.names.positions))
        return self.runtime.steps.decode_once(weights, states, token, carry, {}, spec)


@dataclasses.dataclass(frozen=True)
class PlannedStaticBatchExecutor(PlannedExecutor):
    """A batch of ``generate``: its cache has one page per row; without a cache every step computes all tokens."""

    states: Any  # the layers behind a prompt, leaves are shapes; None without a cache

    name = "generate"
    num_spare = 0

    def page_size(self, asked: int, max_len: int) -> int:
        """All tokens of a row."""
        return next_bucket(max_len)

    def steps(self, plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """As `PlannedRoad.steps`."""
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
        """The cache of `num_slots` rows: keys and values by heads, all else on every device."""
        pools = {id(leaf) for leaf in _pools(self.states)}

        def place(leaf: Any) -> Any:
            is_pool = id(leaf) in pools
            where = self.sharding.pool_sharding(leaf.shape[1]) if is_pool else self.sharding.replicated()
            return jax.ShapeDtypeStruct((num_slots, *leaf.shape[1:]), leaf.dtype, sharding=where)

        return jax.tree.map(place, self.states)


def generate_road(
    runtime: ModelRuntime, sharding: ModelSharding, max_len: int, num_slots: int, why: str
) -> PlannedStaticBatchExecutor:
    """The road of ``generate``, found by tracing a prompt.

    Raises:
        UnsupportedModelError: not even that can be traced; with all reasons.
    """
    capacity = next_bucket(max_len)
    batch = _Batch(runtime, num_slots, capacity)
    ids = jax.ShapeDtypeStruct((num_slots, min(SHORTEST, capacity)), np.int32)
    try:
        _, states = jax.eval_shape(batch.prefill, runtime.weights, ids, jax.ShapeDtypeStruct((), np.int32))
    except Exception as error:  # whatever model code raises in a trace
        said = str(error) if isinstance(error, TorchaxServeError) else f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(
            f"expected a forward that can be traced, got {' '.join(said.split())[:300]}; {why}"
        ) from error
    if states is None:
        return PlannedStaticBatchExecutor(
            runtime, sharding, (), (), f"{why}; without a cache: {runtime.cache_support.unsupported_reason}", None
        )
    pools = _pools(states)
    known = {id(leaf) for leaf in pools}
    pages = tuple(PagedLayerSpec(leaf.shape[1], leaf.shape[3], np.dtype(leaf.dtype), None) for leaf in pools)
    rows = tuple(
        SlotStateSpec(tuple(leaf.shape[1:]), np.dtype(leaf.dtype))
        for leaf in jax.tree.leaves(states)
        if id(leaf) not in known
    )
    return PlannedStaticBatchExecutor(runtime, sharding, pages, rows, why, states)


def _pools(states: Any) -> list[Any]:
    """The leaves that hold keys and values ``[rows, heads, capacity, width]``."""
    layers = (layer for layer in states if isinstance(layer, AttentionLayer))
    return [pool for layer in layers for name in layer.POOLS if (pool := getattr(layer, name)) is not None]


class PlannedPackedExecutor(PlannedExecutor):
    """Many sequences packed into one, on pages."""

    name = "packed"

    def steps(self, plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """As `PlannedRoad.steps`."""
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
            return self.runtime.program.forward_packed(weights, pools, batch, layout)

        length = plan.max_len if is_decode else num_tokens
        return Step(name, num_tokens, num_rows, length, 0 if is_decode else 1, run, (pools, batch), (0,))


@dataclasses.dataclass(frozen=True)
class PlannedPerSequenceExecutor(PlannedExecutor):
    """Each request a forward of its own, over what is gathered from its pages, and its states."""

    forward: SequenceForward
    layout: CacheLayout

    name = "gathered"

    def row_bytes(self, row: SlotStateSpec) -> int:
        """Bytes on one device of what a request keeps as a whole: its channels or heads, where they divide."""
        sharding = self.sharding.state_sharding((1, *row.shape))
        return math.prod(sharding.shard_shape((1, *row.shape))) * row.dtype.itemsize

    def steps(self, plan: CacheAllocation, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """As `PlannedRoad.steps`; a chunk of a prompt may be shorter than asked, and lies at the prompt's end."""
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
    """The first road that the model's code lets it take, found by tracing.

    Raises:
        UnsupportedModelError: none; with the reasons.
    """
    sizes = MemoryBudget(max_len, num_slots, page_size, num_slots, None)
    try:
        return PlannedPackedExecutor(runtime, sharding, packed_shapes(runtime, sizes), (), None)
    except NotPackableError as reason:
        why = f"not packed: {reason}"
    try:
        forward = SequenceForward(runtime)
        layout = forward.layout()
        return PlannedPerSequenceExecutor(runtime, sharding, layout.pages, layout.rows, why, forward, layout)
    except UnsupportedModelError as reason:
        why += f"; not gathered: {reason}"
    return generate_road(runtime, sharding, max_len, num_slots, why)
