"""Forwards of several requests, each on its own cache: side by side, or one after the other."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from model_adapters.ops import list_ops, registry
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.cpu import ffi
from model_adapters.ops.lora_weight import adapters_told
from torchax_serve.executors.per_sequence_blocks import BlockForward
from torchax_serve.kv_cache.cache_layout import UNBOUNDED, CacheLayout, Leaves

VMAP_SAFE_IMPLEMENTATIONS = {"grouped_matmul": "tiled"}
"""Implementations that `jax.vmap` can follow, where that is not the reference; JAX cannot follow `ragged_dot`."""
BATCHED = frozenset({"grouped_matmul", "routed_matmul"})
"""Ops whose kernels have a batching rule: rows of a vmap are rows of one call."""


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
    adapters: jax.Array | None = None,
    deltas: jax.Array | None = None,
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
        adapters: int32[S], adapter of each row, 0 for none.
        deltas: int32[S], added to positions for rotary embeddings.
        block_len: Maximum number of tokens of one forward.

    Returns:
        Logits float32[S, n, vocab], and new keys, values and states by leaf, ``[S, ...]``.
    """

    def one(row: tuple[Any, ...]) -> Any:
        leaves, offset, ids, length, wanted, source_len, adapter, delta = row
        how: dict[str, Any] = {} if delta is None else {"delta": delta}
        length = len(ids) if length is None else length
        how |= {"block_len": block_len, "wanted": wanted}
        with adapters_told(adapter):
            return forward.extend(weights, leaves, offset, ids, length, layout, source_len, **how)

    rows = (leaves, offsets, ids, lens, wanted, source_lens, adapters, deltas)
    if len(offsets) == 1:
        return jax.tree.map(lambda x: x[None], one(jax.tree.map(lambda x: x[0], rows)))
    if not layout.is_vectorised:
        return jax.lax.map(one, rows)
    with contextlib.ExitStack() as stack:
        for op in list_ops():  # other kernels would run row by row, each reading all weights
            if op.name in BATCHED and registry.platform() == "cpu" and ffi.missing() is None:
                continue
            name = VMAP_SAFE_IMPLEMENTATIONS.get(op.name, registry.REFERENCE)
            stack.enter_context(registry.use(op.name, name))
        return jax.vmap(one)(rows)
