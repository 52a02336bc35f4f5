"""One forward of a draft head over packed sequences, on the paged cache."""

from __future__ import annotations

import functools

import jax

from model_adapters.attention import attention_name
from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.index_handles import HandleMode
from model_adapters.caches.packed_batch import PackedBatch, PagedLayout, Pool, laid_out
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.ops.compressed_weight import Weights
from model_adapters.program.model_program import ModelProgram
from model_adapters.program.rope import lengths_told


def forward_head(
    program: ModelProgram,
    weights: Weights,
    pools: tuple[Pool, ...],
    batch: PackedBatch,
    layout: PagedLayout,
    hidden: jax.Array,
    *,
    is_captured: bool,
) -> tuple[jax.Array, jax.Array, tuple[Pool, ...]]:
    """Returns what a head computes of each sequence's last token, and its pages; to be traced.

    Args:
        program: The head.
        weights: Every tensor of the head by qualified name.
        pools: Pages of its layer, and of its indexer if it has one.
        batch: T tokens of S sequences. Positions and lengths are those of `hidden`: a token less than its text has.
        layout: What is static of the paged cache: of one layer.
        hidden: float[T, width], hidden state in front of each token.
        is_captured: Whether `hidden` is the model's, or the head's own of the token before.

    Returns:
        Logits [S, columns], hidden states [S, hidden], and the pools.
    """
    name = "captured" if is_captured else "hidden"
    run = program.with_split_concats(functools.partial(_forward, program, layout=layout, name=name))
    result: tuple[jax.Array, jax.Array, tuple[Pool, ...]] = run(weights, pools, batch, hidden)
    return result


def _forward(
    program: ModelProgram,
    weights: Weights,
    pools: tuple[Pool, ...],
    batch: PackedBatch,
    hidden: jax.Array,
    *,
    layout: PagedLayout,
    name: str,
) -> tuple[jax.Array, jax.Array, tuple[Pool, ...]]:
    cache = PagedTraceCache(pools, batch, layout)
    assert program.cache_name is not None
    kwargs = {
        "input_ids": torch_view(batch.token_ids[None]),
        "position_ids": torch_view(batch.positions[None]),
        name: torch_view(hidden[None]),
        "logits_to_keep": torch_view(batch.last),
        program.cache_name: cache,
    }
    rope_lens = batch.positions + 1 if program.rope is not None else None
    with lengths_told(rope_lens):
        handles = HandleMode() if layout.parts else None
        output = program.run(weights, kwargs, attention_name(program.module), handles)
    pools = cache.pools()
    logits, own = program.unpadded_logits(jax_view(output["logits"])[0]), jax_view(output["hidden"])[0]
    if program.sharding is not None:
        place = program.sharding.pool_sharding, jax.lax.with_sharding_constraint
        pools = tuple(laid_out(pool, *place) for pool in pools)
        own = jax.lax.with_sharding_constraint(own, program.sharding.replicated())
    return logits, own, pools
