"""One forward of many sequences packed into one ragged row, on the paged cache."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters import quirks
from model_adapters.attention import ADDITIVE_MASK, attention_name
from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.device_cache import check_layers_keep_all
from model_adapters.caches.index_handles import HandleMode
from model_adapters.caches.packed_batch import NotPackableError, PackedBatch, PagedLayout, Pool, laid_out
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.caches.state_layer import asking
from model_adapters.jaxpr.row_pruning import prune_rows
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.lora_weight import adapters_told
from model_adapters.ops.spmd import by_token, tokens_divided
from model_adapters.program.call_spec import CallSpec
from model_adapters.program.media import features_in_place
from model_adapters.program.model_program import ModelProgram
from model_adapters.program.rope import lengths_told
from model_adapters.sharding.model_sharding import ModelSharding


def forward_packed(
    program: ModelProgram, weights: Weights, pools: tuple[Pool, ...], batch: PackedBatch, layout: PagedLayout
) -> tuple[jax.Array, tuple[Pool, ...]]:
    """Returns the logits of packed sequences, and the new pools.

    The logits are [S, vocab], of each sequence's last token, or [T, vocab] with `all_logits`. To be traced.

    Args:
        program: The model.
        weights: Every tensor of the module by qualified name.
        pools: Pages of each layer.
        batch: T tokens of S sequences.
        layout: What is static of the paged cache.

    Raises:
        NotPackableError: something in the model's code does not let sequences be packed.
    """
    logits, pools, _ = forward_with_hidden(program, weights, pools, batch, layout, ())
    return logits, pools


def forward_with_hidden(
    program: ModelProgram,
    weights: Weights,
    pools: tuple[Pool, ...],
    batch: PackedBatch,
    layout: PagedLayout,
    layers: Sequence[int],
) -> tuple[jax.Array, tuple[Pool, ...], jax.Array | None]:
    """Returns what `forward_packed` does, and hidden states of all tokens.

    Args:
        program, weights, pools, batch, layout: As of `forward_packed`.
        layers: Hidden states as ``output_hidden_states`` counts them: i is what layer i reads, -1 what the head does.

    Returns:
        Logits, pools, and float[T, len(layers) * hidden], or None for no `layers`.

    Raises:
        NotPackableError: something in the model's code does not let sequences be packed.
    """
    if program.names.has_encoder:
        raise NotPackableError("there is an encoder beside the decoder")
    attends = program.accepts("position_ids") and _attention_name(program) is not None
    if not program.cache_name or (layout.groups and not attends):
        raise NotPackableError("the forward takes no positions, or attends past transformers' attention interface")
    run = program.with_split_concats(functools.partial(_forward, program, layout=layout, layers=tuple(layers)))
    # In a decode step every row is read.
    result: Any = (run if layout.is_decode or layout.all_logits else prune_rows(run))(weights, pools, batch)
    return result


def _forward(
    program: ModelProgram,
    weights: Weights,
    pools: tuple[Pool, ...],
    batch: PackedBatch,
    layout: PagedLayout,
    layers: tuple[int, ...],
) -> tuple[jax.Array, tuple[Pool, ...], jax.Array | None]:
    sharding = program.sharding
    divided: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if sharding is not None and not layout.is_decode and sharding.divides_tokens(batch.token_ids.shape[0]):
        weights, divided = sharding.with_gathered_layers(weights), tokens_divided()
        ids, positions = (by_token(x, sharding.mesh) for x in (batch.token_ids, batch.positions))
        batch = dataclasses.replace(batch, token_ids=ids, positions=positions)
    cache = PagedTraceCache(pools, batch, layout)
    if (kind := quirks.of(program.module).spans_in) is not None:
        cache.keep_causal(each != kind for each in program.module.config.get_text_config().layer_types)
    assert program.cache_name is not None
    kwargs = {
        "input_ids": torch_view(batch.token_ids[None]),
        program.cache_name: cache,
        "use_cache": True,
    }
    if program.accepts("position_ids"):
        kwargs["position_ids"] = torch_view(_rotary_positions(batch))
    if layers:
        kwargs["output_hidden_states"] = True
    keep_last = program.accepts("logits_to_keep") and not layout.all_logits
    if program.accepts("logits_to_keep"):
        # A number, as the default is one, has Gemma 4 cut its masks, which then are no longer known as causal.
        kwargs["logits_to_keep"] = torch_view(batch.last) if keep_last else slice(None)
    rope_lens = batch.positions + 1 if layout.is_decode else batch.rope_lens
    assert program.rope is None or rope_lens is not None
    features = features_in_place(program, batch.media)
    lengths, adapters = lengths_told(rope_lens), adapters_told(batch.adapters)
    handles = HandleMode() if layout.parts else None
    with divided, program.folding(CallSpec()), lengths, adapters, features, asking():
        output = program.run(weights, kwargs, _attention_name(program), handles)
    check_layers_keep_all(cache, program.cache_name, program.target)
    logits = jax_view(output["logits"])[0]
    if not keep_last and not layout.all_logits:
        logits = logits[batch.last]
    pools = cache.pools()
    if sharding is not None and not any(kept.is_open for kept in layout.layers):
        pools = constrain_pools(pools, layout, sharding)
    hidden = _side_by_side(output, layers)
    if sharding is not None and hidden is not None:  # replicated, as the draft head's weights take it
        hidden = jax.lax.with_sharding_constraint(hidden, sharding.replicated())
    return program.unpadded_logits(logits), pools, hidden


def _attention_name(program: ModelProgram) -> str | None:
    """Returns the attention implementation of a packed step; None: it cannot be on pages."""
    name = attention_name(program.module)
    return ADDITIVE_MASK if name is None and quirks.of(program.module).packed_interface else name


def constrain_pools(pools: tuple[Any, ...], layout: PagedLayout, sharding: ModelSharding) -> tuple[Any, ...]:
    """Constrains the model's pools to the shardings that the next step takes them with."""
    pages, states = pools[: len(layout.groups)], pools[len(layout.groups) :]
    recurrent = {kept.recurrent for kept in layout.layers}
    placed = [laid_out(pool, sharding.pool_sharding, jax.lax.with_sharding_constraint) for pool in pages]
    for place, state in enumerate(states, len(pages)):
        of_shape = sharding.recurrent_sharding if place in recurrent else sharding.state_sharding
        placed.append(jax.lax.with_sharding_constraint(state, of_shape(state.shape)))
    return tuple(placed)


def _side_by_side(output: Any, layers: tuple[int, ...]) -> jax.Array | None:
    """Returns a model's hidden states, float[T, len(layers) * hidden]; None for no `layers`."""
    if not layers:
        return None
    states = output.get("hidden_states")
    if states is None:
        raise NotPackableError("the model does not return its hidden states, which a draft head reads")
    return jnp.concatenate([jax_view(states[layer])[0] for layer in layers], axis=-1)


def _rotary_positions(batch: PackedBatch) -> jax.Array:
    """Returns int32[1, T] or, of tokens with positions on several axes, int32[axes, 1, T]."""
    if batch.media is not None and batch.media.positions is not None:
        given = batch.media.positions
        return given if given.shape[0] == 1 else given[:, None]  # PaliGemma counts from 1, on one axis
    positions = batch.positions if batch.deltas is None else batch.positions + batch.deltas
    return positions[None]
