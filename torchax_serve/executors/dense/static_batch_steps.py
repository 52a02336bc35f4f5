"""`StaticBatchSteps`: prefill and decode of a static batch, as abstract steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.layers import AttentionLayer
from model_adapters.errors import TorchaxServeError, UnsupportedModelError
from model_adapters.program.model_program import CallSpec
from torchax_serve.buckets import next_bucket
from torchax_serve.executors.base import AbstractStep, abstract_ints
from torchax_serve.kv_cache.cache_layout import SlotStateSpec
from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.runtime.step_functions import BatchPosition, DecodeSpec

PROBE_LEN = 16
"""Number of prompt tokens in the trace that finds the cache of a static batch."""


@dataclasses.dataclass(frozen=True)
class StaticBatchSteps:
    """Steps of a static batch; without a cache every step computes all tokens.

    Attributes:
        runtime: Runtime of the model.
        num_rows: Number of rows in the batch.
        capacity: Number of tokens that a row has room for.
        states: Cache layers after a prompt, leaves are shapes; None without a cache.
    """

    runtime: ModelRuntime
    num_rows: int
    capacity: int
    states: Any = None

    @classmethod
    def traced(cls, runtime: ModelRuntime, num_rows: int, max_len: int) -> StaticBatchSteps:
        """Finds the cache by tracing a prompt.

        Raises:
            UnsupportedModelError: the forward cannot be traced.
        """
        steps = cls(runtime, num_rows, next_bucket(max_len))
        ids = abstract_ints(None, num_rows, min(PROBE_LEN, steps.capacity))
        # Model code may raise anything while it is traced.
        try:
            _, states = jax.eval_shape(steps.prefill, runtime.weights, ids, abstract_ints(None))
        except Exception as error:
            text = str(error) if isinstance(error, TorchaxServeError) else f"{type(error).__name__}: {error}"
            raise UnsupportedModelError(
                f"expected a forward that can be traced, got {' '.join(text.split())[:300]}"
            ) from error
        return dataclasses.replace(steps, states=states)

    @property
    def pages(self) -> tuple[PagedLayerSpec, ...]:
        """Keys and values of each layer; a row has one page."""
        return tuple(
            PagedLayerSpec(leaf.shape[1], leaf.shape[3], np.dtype(leaf.dtype), None) for leaf in self._key_values()
        )

    @property
    def slot_states(self) -> tuple[SlotStateSpec, ...]:
        """All else that the cache stores for a row."""
        known = {id(leaf) for leaf in self._key_values()}
        return tuple(
            SlotStateSpec(tuple(leaf.shape[1:]), np.dtype(leaf.dtype))
            for leaf in jax.tree.leaves(self.states)
            if id(leaf) not in known
        )

    def _key_values(self) -> list[Any]:
        """Returns the leaves that hold keys and values ``[rows, heads, capacity, width]``."""
        layers = (layer for layer in self.states or () if isinstance(layer, AttentionLayer))
        return [pool for layer in layers for name in layer.POOLS if (pool := getattr(layer, name)) is not None]

    def prefill(self, weights: Any, ids: jax.Array, last: jax.Array) -> tuple[jax.Array, Any]:
        """Computes logits [rows, vocab] of the token at index `last` of a prompt, and the cache."""
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

    def abstract_steps(self, prefill_lens: Sequence[int], max_len: int) -> Iterator[AbstractStep]:
        """Yields the decode step at `max_len` tokens, then the prefill steps.

        There is one prefill step for each of `prefill_lens`.
        """
        sharding, rows = self.runtime.program.sharding, self.num_rows
        one = abstract_ints(sharding)

        def prompt(name: str, length: int) -> AbstractStep:
            args = (abstract_ints(sharding, rows, length), one)
            return AbstractStep(name, rows * length, rows, length, rows, self.prefill, args, ())

        if self.states is None:
            yield prompt("decode", self.capacity)
        else:
            row = abstract_ints(sharding, rows)
            args = (self._on_mesh(), row, BatchPosition(row, one, row))
            yield AbstractStep("decode", rows, rows, max_len, 0, self.decode, args, (0,))
        for length in prefill_lens:
            yield prompt("prefill", length)

    def _on_mesh(self) -> Any:
        """Returns the cache of all rows: keys and values sharded by heads, all else replicated."""
        sharding = self.runtime.program.sharding
        known = {id(leaf) for leaf in self._key_values()}

        def place(leaf: Any) -> Any:
            where = None
            if sharding is not None:
                where = sharding.pool_sharding(leaf.shape[1]) if id(leaf) in known else sharding.replicated()
            return jax.ShapeDtypeStruct((self.num_rows, *leaf.shape[1:]), leaf.dtype, sharding=where)

        return jax.tree.map(place, self.states)
