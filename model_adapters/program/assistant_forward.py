"""Forward of Gemma 4's assistant over rows of one token, on its model's pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.attention import attention_name
from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.packed_batch import PackedBatch, PagedLayout, Pool, ScaledPool, laid_out, pages_of
from model_adapters.caches.paged_layers import PagedLayer, PagedWrite
from model_adapters.ops.compressed_weight import Weights
from model_adapters.program.model_program import ModelProgram
from model_adapters.program.rope import lengths_told


def forward_assistant(
    program: ModelProgram,
    weights: Weights,
    pools: Sequence[Pool],
    batch: PackedBatch,
    layout: PagedLayout,
    hidden: jax.Array,
    kinds: Mapping[str, int],
) -> tuple[jax.Array, jax.Array, tuple[Pool, ...]]:
    """Returns logits [S, vocab], hidden states [S, hidden], and the pools; to be traced.

    Args:
        program: The assistant.
        weights: Every tensor of it by qualified name.
        pools: Pages that are read, by kind of layer.
        batch: One token of S rows, whose keys are not among those of the rows. A table for each pool.
        layout: What is static of the pools, of decode steps.
        hidden: float[S, hidden], in front of each token.
        kinds: Columns of the keys by kind of layer, in the order of the pools.
    """
    layers, windows, shared = [], {}, {}
    parts = zip(kinds.items(), pools, batch.page_tables, layout.windows, strict=True)
    for (kind, dim), pool, table, window in parts:
        layer = PagedLayer(pool, batch, table, window, layout)
        # The op writes a token and attends: what it writes is the last token that is there.
        keys, values = (torch_view(each) for each in _last_entry(pool, table, batch.kv_lens, dim, hidden.dtype))
        keys.paged_write = PagedWrite(layer, values)
        layers.append(layer)
        # The token itself takes a place of the window; pages before it may be gone.
        windows[kind], shared[kind] = None if window is None else max(1, window - 1), (keys, values)
    kwargs = {
        "input_ids": torch_view(batch.token_ids[None]),
        "position_ids": torch_view(batch.positions[None]),
        "hidden": torch_view(hidden[None]),
        "shared_kv_states": shared,
        "windows": windows,
    }
    with lengths_told(batch.positions + 1 if program.rope is not None else None):
        output = program.run(weights, kwargs, attention_name(program.module))
    logits, own = program.unpadded_logits(jax_view(output["logits"])[0]), jax_view(output["hidden"])[0]
    after, on_mesh = tuple(layer.pool for layer in layers), program.sharding
    if on_mesh is not None:
        own = jax.lax.with_sharding_constraint(own, on_mesh.replicated())
        after = tuple(laid_out(pool, on_mesh.pool_sharding, jax.lax.with_sharding_constraint) for pool in after)
    return logits, own, after


def _last_entry(pool: Pool, table: jax.Array, lens: jax.Array, dim: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values of the last position of each row, [1, kv_heads, S, dim] each."""
    pages = pages_of(pool)
    at = jnp.maximum(lens - 1, 0)
    page = jnp.take_along_axis(table, at[:, None] // pages.shape[2], axis=1)[:, 0]
    entry = pages[page, :, at % pages.shape[2]]  # [S, kv_heads, width]
    keys, values = entry[..., :dim], entry[..., dim : 2 * dim]
    if isinstance(pool, ScaledPool):
        keys = keys.astype(jnp.float32) * pool.k_scale[:, None]
        values = values.astype(jnp.float32) * pool.v_scale[:, None]
    return tuple(jnp.swapaxes(each, 0, 1)[None].astype(dtype) for each in (keys, values))  # type: ignore[return-value]
