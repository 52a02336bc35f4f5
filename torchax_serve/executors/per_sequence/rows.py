"""Forwards of several requests, each on its own cache: side by side, or one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from model_adapters.ops import list_ops, registry
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.lora_weight import adapters_told
from torchax_serve.executors.per_sequence.blocks import BlockForward
from torchax_serve.kv_cache.cache_layout import UNBOUNDED, CacheLayout, Leaves

VMAP_SAFE_IMPLEMENTATIONS = {"grouped_matmul": "tiled"}
"""Implementations that `jax.vmap` can follow, where that is not the reference; JAX cannot follow `ragged_dot`."""


def extend_rows(
    forward: BlockForward,
    weights: Weights,
    leaves: Leaves,
    offsets: jax.Array,
    ids: jax.Array,
    layout: CacheLayout,
    *,
    lens: jax.Array | None = None,
    wanted: jax.Array | None = None,
    source_lens: jax.Array | None = None,
    slots: jax.Array | None = None,
    padded_source_len: int = 0,
    adapters: jax.Array | None = None,
    deltas: jax.Array | None = None,
    table: jax.Array | None = None,
    rope_lens: jax.Array | None = None,
    block_len: int = UNBOUNDED,
) -> Any:
    """Computes tokens of S rows, as `SequenceForward.extend` does those of one.

    Args:
        forward: The model's.
        weights: Weights by name.
        leaves: What the cache has of the rows, ``[S, ...]``.
        offsets: int32[S], tokens in the cache.
        ids: int32[S, T].
        layout: Layout of the cache.
        lens: int32[S], tokens that are no padding; None: all. Padding changes the states.
        wanted: int32[S, n], tokens whose logits are returned; None: the last one of each row.
        source_lens: int32[S], lengths of encoder outputs without padding.
        slots: int32[S]: leaves of encoder outputs are those of all slots, and empty ones are returned.
        padded_source_len: Length that encoder outputs are padded to, with `slots`.
        adapters: int32[S], adapter of each row, 0 for none.
        deltas: int32[S], added to positions for rotary embeddings.
        table: int32[S, pages]: leaves in pages are pools, and returned as such; None: they are dense, ``[S, ...]``.
        rope_lens: int32[S], minimum lengths of the rotary frequencies; None: each token's own.
        block_len: Maximum number of tokens of one forward.

    Returns:
        Logits float32[S, n, vocab], and new keys, values and states by leaf, ``[S, ...]``.
    """

    def one(pools: Leaves, row: tuple[Any, ...]) -> Any:
        kept, offset, ids, length, wanted, source_len, slot, adapter, delta, pages, rope_len = row
        how = {"block_len": block_len, "wanted": wanted, "table": pages, "slot": slot}
        how |= {"padded_source_len": padded_source_len} | ({} if delta is None else {"delta": delta})
        how |= {} if rope_len is None else {"rope_len": rope_len}
        length = len(ids) if length is None else length
        leaves = kept if slot is None else layout.with_sources(of_source, kept)
        leaves = leaves if pages is None else layout.merge(pools, leaves)
        with adapters_told(adapter):
            found, news = forward.extend(weights, leaves, offset, ids, length, layout, source_len, **how)
        return (found, ((), news)) if pages is None else (found, layout.partition(news))

    pools, kept = ((), leaves) if table is None else layout.partition(leaves)
    of_source, kept = ((), kept) if slots is None else layout.without_sources(kept)
    rows = (kept, offsets, ids, lens, wanted, source_lens, slots, adapters, deltas, table, rope_lens)
    found, (pools, news) = _of_all_rows(one, pools, rows, len(offsets), layout)
    return found, news if table is None else layout.merge(pools, news)


def begin_rows(
    forward: BlockForward,
    weights: Weights,
    ids: jax.Array,
    lens: jax.Array,
    layout: CacheLayout,
    *,
    hidden: jax.Array | None = None,
    source_lens: jax.Array | None = None,
    adapters: jax.Array | None = None,
    rope_lens: jax.Array | None = None,
    block_len: int = UNBOUNDED,
) -> Any:
    """Computes the first tokens of S prompts, as `SequenceForward.prefill` does those of one.

    Args:
        forward: The model's.
        weights: Weights by name.
        ids: int32[S, T].
        lens: int32[S], tokens that are no padding.
        layout: Layout of the cache.
        hidden: Encoder outputs ``[S, padded_len, width]``; None without an encoder.
        source_lens: int32[S], lengths of encoder outputs without padding.
        adapters: int32[S], adapter of each row, 0 for none.
        rope_lens: int32[S], minimum lengths of the rotary frequencies; None: each token's own.
        block_len: Maximum number of tokens of one forward.

    Returns:
        Logits float32[S, vocab] of last tokens, and new keys, values and states by leaf, ``[S, ...]``.
    """

    def one(pools: Leaves, row: tuple[Any, ...]) -> Any:
        ids, length, hidden, source_len, adapter, rope_len = row
        source = () if hidden is None else (hidden[None], source_len)
        how = {"block_len": block_len} | ({} if rope_len is None else {"rope_len": rope_len})
        with adapters_told(adapter):
            found, news = forward.prefill(weights, ids, length, layout, *source, **how)
        return found[0], (pools, news)

    rows = (ids, lens, hidden, source_lens, adapters, rope_lens)
    found, (_, news) = _of_all_rows(one, (), rows, len(ids), layout)
    return found, news


def _of_all_rows(
    one: Callable[..., Any], pools: Leaves, rows: tuple[Any, ...], num_rows: int, layout: CacheLayout
) -> Any:
    """Returns the results of `one` for all rows, and the pools after them.

    Args:
        one: From pools and a row to a result, and the pools and what is new.
        pools: Pages of all rows.
        rows: Arrays ``[S, ...]``.
        num_rows: S.
        layout: Layout of the cache.
    """
    if num_rows == 1:
        found, (pools, news) = one(pools, jax.tree.map(lambda x: x[0], rows))
        return jax.tree.map(lambda x: x[None], found), (pools, jax.tree.map(lambda x: x[None], news))
    if not layout.is_vectorised:
        # Rows one after the other. The carry is the pools, which each row writes its own pages of: no row reads what
        # another one has written.
        def step(pools: Leaves, row: tuple[Any, ...]) -> Any:
            found, (pools, news) = one(pools, row)
            return pools, (found, news)

        pools, (found, news) = jax.lax.scan(step, pools, rows)
        return found, (pools, news)
    with contextlib.ExitStack() as stack:
        if registry.platform() != "cpu" or layout.is_on_mesh:
            for op in list_ops():  # kernels would run row by row, each reading all weights
                name = VMAP_SAFE_IMPLEMENTATIONS.get(op.name, registry.REFERENCE)
                stack.enter_context(registry.use(op.name, name))
        return jax.vmap(one, in_axes=(None, 0), out_axes=(0, (None, 0)))(pools, rows)
