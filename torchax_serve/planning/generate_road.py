"""The road of ``generate`` by itself, for models that the engine cannot batch: rows that begin together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.cache_layers import AttentionLayer
from model_adapters.errors import TorchaxServeError, UnsupportedModelError
from model_adapters.program import CallSpec
from model_adapters.sharding import ModelSharding
from torchax_serve.buckets import bucket
from torchax_serve.kv_cache.pools import CachePlan, PageShape
from torchax_serve.kv_cache.state_layout import StateRow
from torchax_serve.planning.planned_road import PlannedRoad
from torchax_serve.planning.programs import Step
from torchax_serve.runtime.model_runtime import Runtime
from torchax_serve.runtime.step_functions import Carry, DecodeSpec

SHORTEST = 16


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Forwards of `num_rows` rows, to be traced.

    Attributes:
        runtime: of the model.
        num_rows: of the batch.
        capacity: tokens that a row has room for.
    """

    runtime: Runtime
    num_rows: int
    capacity: int

    def prefill(self, weights: Any, ids: jax.Array, last: jax.Array) -> tuple[jax.Array, Any]:
        """Logits [rows, vocab] of the token `last` of a prompt, and the cache behind it."""
        runtime = self.runtime
        states, offset = None, None
        names = runtime.program.names
        inputs = {names.ids: ids, "last": last}
        if runtime.caches.can_make:
            states, offset = runtime.caches.new(self.capacity).states, jnp.int32(0)
            if runtime.program.accepts(names.positions):  # without a cache code counts them itself, and may read them
                inputs[names.positions] = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        fields, states = runtime.program.forward(weights, states, offset, inputs, CallSpec())
        if "logits" not in fields:
            raise UnsupportedModelError(
                f"expected a model whose forward returns logits, got {', '.join(sorted(fields)) or 'nothing'}"
            )
        return fields["logits"][:, -1], states

    def decode(self, weights: Any, states: Any, token: jax.Array, carry: Carry) -> tuple[jax.Array, Any, Carry]:
        """Logits [rows, vocab] of the next token, the cache, and where the batch stands."""
        spec = DecodeSpec(CallSpec(), self.runtime.program.accepts(self.runtime.program.names.positions))
        return self.runtime.steps.decode_once(weights, states, token, carry, {}, spec)


@dataclasses.dataclass(frozen=True)
class GenerateRoad(PlannedRoad):
    """A batch of ``generate``: its cache has one page per row; without a cache every step computes all tokens."""

    states: Any  # the layers behind a prompt, leaves are shapes; None without a cache

    name = "generate"
    num_spare = 0

    def page_len(self, asked: int, max_len: int) -> int:
        """All tokens of a row."""
        return bucket(max_len)

    def steps(self, plan: CachePlan, num_slots: int, lens: Sequence[int]) -> Iterator[Step]:
        """As `PlannedRoad.steps`."""
        batch = _Batch(self.runtime, num_slots, plan.page_len)
        one = self.integers()
        if self.states is None:
            ids = self.integers(num_slots, plan.page_len)
            num_tokens = num_slots * plan.page_len
            yield Step("decode", num_tokens, num_slots, plan.page_len, num_slots, batch.prefill, (ids, one), ())
        else:
            row = self.integers(num_slots)
            args = (self._laid_out(num_slots), row, Carry(row, one, row))
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


def generate_road(runtime: Runtime, sharding: ModelSharding, max_len: int, num_slots: int, why: str) -> GenerateRoad:
    """The road of ``generate``, found by tracing a prompt.

    Raises:
        UnsupportedModelError: not even that can be traced; with all reasons.
    """
    capacity = bucket(max_len)
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
        return GenerateRoad(runtime, sharding, (), (), f"{why}; without a cache: {runtime.caches.why_none}", None)
    pools = _pools(states)
    known = {id(leaf) for leaf in pools}
    pages = tuple(PageShape(leaf.shape[1], leaf.shape[3], np.dtype(leaf.dtype), None) for leaf in pools)
    rows = tuple(
        StateRow(tuple(leaf.shape[1:]), np.dtype(leaf.dtype))
        for leaf in jax.tree.leaves(states)
        if id(leaf) not in known
    )
    return GenerateRoad(runtime, sharding, pages, rows, why, states)


def _pools(states: Any) -> list[Any]:
    """The leaves that hold keys and values ``[rows, heads, capacity, width]``."""
    layers = (layer for layer in states if isinstance(layer, AttentionLayer))
    return [pool for layer in layers for name in layer.POOLS if (pool := getattr(layer, name)) is not None]
