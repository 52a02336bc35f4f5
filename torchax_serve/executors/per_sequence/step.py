"""A step of the per-sequence executor, as it is traced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.caches.packed_batch import MediaTokens, PackedBatch, PagedLayout, Pool, laid_out
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.lora_weight import adapters_told
from torchax_serve.executors.per_sequence.batching import StepInputs
from torchax_serve.executors.per_sequence.buckets import PerSequenceSpec
from torchax_serve.executors.per_sequence.forward import SequenceForward
from torchax_serve.executors.per_sequence.rows import begin_rows, extend_rows
from torchax_serve.executors.slot_adapters import SlotAdapters
from torchax_serve.executors.speculation.draft_head import DraftHead
from torchax_serve.executors.step_inputs import SAMPLED_ON_DEVICE
from torchax_serve.kv_cache.cache_layout import CacheLayout, Leaves, SlotStates
from torchax_serve.kv_cache.slot_states import scatter


class SequenceStep:
    """Steps of rows, each a forward of its own.

    Args:
        forward: Forward of one request; with a head it returns hidden states, too.
        layout: What a request stores in pages and in states.
        adapters: The adapter of each slot.
        head: Draft head that follows each step; None: there is none.
        max_len: Most tokens of a request.
    """

    def __init__(
        self,
        forward: SequenceForward,
        layout: CacheLayout,
        adapters: SlotAdapters,
        head: DraftHead | None,
        max_len: int,
    ) -> None:
        self._forward, self._layout, self._adapters, self._head = forward, layout, adapters, head
        self._of_head = PagedLayout(groups=(0,), windows=(None,), max_len=max_len)

    def run(
        self,
        weights: Any,
        pools: tuple[Any, ...],
        states: SlotStates,
        last_tokens: jax.Array,
        numbers: jax.Array,
        hidden: jax.Array | None,
        media: MediaTokens | None = None,
        *,
        spec: PerSequenceSpec,
    ) -> tuple[jax.Array, tuple[Any, ...], SlotStates]:
        """Computes logits float32[S, vocab] (or [T, vocab]) of a step, pools and states.

        `hidden` are encoder outputs ``[S, padded_len, width]``; given for the first chunks of requests only. `media`
        are the images of a chunk.
        """
        headed, of_head = weights, pools[len(self._layout.pages) :]
        weights, pools = (weights if self._head is None else weights.model), pools[: len(self._layout.pages)]
        given = StepInputs.of(numbers[: sum(spec.sizes)], spec)
        adapters = self._adapters.of_rows(numbers, given.slots)
        known = last_tokens[jnp.minimum(given.slots, len(last_tokens) - 1)]  # padding's slot is behind the last
        ids = given.ids.reshape(spec.num_rows, spec.num_tokens)
        ids = jnp.where(ids == SAMPLED_ON_DEVICE, known[:, None], ids)
        table = given.tables.reshape(spec.num_rows, spec.num_pages)
        if spec.kind == "begin":
            found, news = self._begin(weights, ids, given, hidden, media, spec, adapters)
            new_pages, new_states = self._layout.partition(news)
            written = zip(pools, new_pages, self._layout.pages, strict=True)
            on_mesh = self._layout.is_on_mesh
            pools = tuple(
                scatter(pool, table, given.starts, given.lens, new, leaf, is_on_mesh=on_mesh)
                for pool, new, leaf in written
            )
        else:
            source_lens = given.source_lens if spec.source_len else None
            of_slots = self._layout.gather_slots(
                states, given.slots, spec.source_len, source_lens, in_place=self._reads_in_place(spec)
            )
            kept = self._layout.merge(pools, of_slots)
            found, news = self._extend(weights, kept, ids, given, table, media, spec, adapters)
            pools, new_states = self._layout.partition(news)
        states = self._layout.scatter_slots(
            states,
            given.slots,
            new_states,
            is_first=spec.kind == "begin",
            source_lens=given.source_lens,
            after=jax.tree.leaves((found, new_states)),
        )
        pools, states = self.with_sharding(pools, states)
        if self._head is None:
            return found, pools, states
        logits, hidden_states = found
        batch = _packed(spec, given, ids, table)
        layout = dataclasses.replace(self._of_head, is_decode=spec.kind == "decode")
        of_head = self._head.follow(headed, of_head, batch, hidden_states, layout)
        return logits, self._head.constrain_pools((*pools, *of_head)), states

    def with_sharding(self, pools: tuple[Pool, ...], states: SlotStates) -> tuple[tuple[Pool, ...], SlotStates]:
        """Constrains `pools` and `states` to the cache's sharding if the model is on a mesh."""
        sharding, constrained = self._forward.program.sharding, jax.lax.with_sharding_constraint
        if sharding is None:
            return pools, states
        return (
            tuple(laid_out(pool, sharding.pool_sharding, constrained) for pool in pools),
            jax.tree.map(lambda state: constrained(state, sharding.state_sharding(state.shape)), states),
        )

    def _reads_in_place(self, spec: PerSequenceSpec) -> bool:
        """Returns whether a step reads keys and values of encoder outputs where they are stored."""
        is_one_query = spec.kind == "decode" and spec.num_tokens == 1
        return is_one_query and bool(spec.source_len) and self._layout.reads_sources_in_place()

    def _begin(
        self,
        weights: Weights,
        ids: jax.Array,
        given: StepInputs,
        hidden: jax.Array | None,
        media: MediaTokens | None,
        spec: PerSequenceSpec,
        adapters: jax.Array | None,
    ) -> tuple[Any, Leaves]:
        """Computes the first chunks of prompts.

        Returns logits (and hidden states), and what is new of all leaves, ``[S, ...]``.
        """
        if spec.num_rows > 1:
            rows: Any = {"adapters": adapters, "rope_lens": given.rope_lens if spec.has_rope_lens else None}
            rows |= {} if hidden is None else {"hidden": hidden, "source_lens": given.source_lens}
            return begin_rows(self._forward, weights, ids, given.lens, self._layout, block_len=spec.block_len, **rows)
        source = () if hidden is None else (hidden, given.source_lens[0])
        how = _how(spec, given) | {"media": media}
        with adapters_told(None if adapters is None else adapters[0]):
            found, news = self._forward.prefill(weights, ids[0], given.lens[0], self._layout, *source, **how)
        return found, jax.tree.map(lambda new: new[None], news)

    def _extend(
        self,
        weights: Weights,
        kept: Leaves,
        ids: jax.Array,
        given: StepInputs,
        table: jax.Array,
        media: MediaTokens | None,
        spec: PerSequenceSpec,
        adapters: jax.Array | None,
    ) -> tuple[Any, Leaves]:
        """Computes logits (and hidden states), pools, and what is new of other leaves, ``[S, ...]``.

        `kept` are pools, and what the cache has of the rows.
        """
        source_lens = given.source_lens if spec.source_len else None
        if spec.kind == "decode" or spec.num_rows > 1:
            deltas = given.deltas if spec.has_deltas else None
            rows: Any = {"source_lens": source_lens, "adapters": adapters, "deltas": deltas, "table": table}
            if self._reads_in_place(spec):
                rows |= {"slots": given.slots, "padded_source_len": spec.source_len}
            if spec.kind == "extend":
                rope_lens = given.rope_lens if spec.has_rope_lens else None
                rows |= {"lens": given.lens, "rope_lens": rope_lens, "block_len": spec.block_len}
            found, news = extend_rows(self._forward, weights, kept, given.starts, ids, self._layout, **rows)
            return jax.tree.map(lambda x: x[:, 0], found), news
        pools, states = self._layout.partition(kept)
        kept = self._layout.merge(pools, tuple(state[0] for state in states))
        offset, length = given.starts[0], given.lens[0]
        source_len = None if source_lens is None else source_lens[0]
        how = _how(spec, given) | {"media": media, "table": table[0]}
        with adapters_told(None if adapters is None else adapters[0]):
            found, news = self._forward.extend(weights, kept, offset, ids[0], length, self._layout, source_len, **how)
        pools, states = self._layout.partition(news)
        return found, self._layout.merge(pools, tuple(state[None] for state in states))


def _how(spec: PerSequenceSpec, given: StepInputs) -> dict[str, Any]:
    """Returns how a chunk is computed, and the minimum length of its rotary frequencies."""
    return spec.how | ({"rope_len": given.rope_lens[0]} if spec.has_rope_lens else {})


def _packed(spec: PerSequenceSpec, given: StepInputs, ids: jax.Array, table: jax.Array) -> PackedBatch:
    """Returns the tokens of a step as a draft head takes them."""
    num_rows, is_decode = spec.num_rows, spec.kind == "decode"
    is_used = given.lens > 0
    ends = jnp.arange(1, num_rows + 1, dtype=jnp.int32) if is_decode else given.lens
    positions = given.starts[:, None] + jnp.arange(spec.num_tokens, dtype=jnp.int32)
    return PackedBatch(
        token_ids=ids.reshape(-1),
        positions=positions.reshape(-1),
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        kv_lens=jnp.where(is_used, given.starts + given.lens, 0),
        last=jnp.maximum(ends - 1, 0),
        page_tables=(table,),
        slots=given.slots,
    )
