"""The paged KV cache inside a trace: many sequences as one packed row of tokens.

A packed forward sees ``[1, T]`` token ids, the new tokens of S sequences one after the other, each with its position.
Everything in a decoder but attention works on tokens one by one, so sequences meet only in the attention op, which is
told where each begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.cache_utils import Cache

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.index_handles import TopTokens
from model_adapters.caches.packed_batch import LayerPools, NotPackableError, PackedBatch, PagedLayout, Pool
from model_adapters.caches.paged_layers import (
    LatentWrite,
    PagedLayer,
    PagedLayerWithParts,
    PagedStateLayer,
    PagedWrite,
    with_parts,
)
from model_adapters.caches.state_layer import StateLayer
from model_adapters.ops.attention_args import AttentionArgs, KVScales
from model_adapters.ops.attention_chunks import chunks_of_step, decode_chunks
from model_adapters.ops.grouped_matmul import by_head
from model_adapters.ops.searchsorted import num_at_most
from model_adapters.ops.segments import Segments
from model_adapters.ops.sparse_attention import sparse_attention


class PagedTraceCache(Cache):
    """The cache as model code sees it in a packed trace."""

    def __init__(self, pools: tuple[Pool, ...], batch: PackedBatch, layout: PagedLayout) -> None:
        self._layout = layout
        self.paged_layers = [
            PagedLayer(pool, batch, batch.page_tables[group], window, layout)
            for pool, group, window in zip(pools, layout.groups, layout.windows, strict=False)
        ]
        places = {place for *_, place in layout.parts}
        of_layers: dict[int, dict[str, PagedLayer]] = {}
        for layer, name, place in layout.parts:
            of_layers.setdefault(layer, {})[name] = self.paged_layers[place]
        for layer, parts in of_layers.items():
            self.paged_layers[layer] = with_parts(self.paged_layers[layer], parts)
        layers: list[Any] = [each for place, each in enumerate(self.paged_layers) if place not in places]
        if layout.layers:
            shared = segments_of(batch, _num_state_rows(pools, layout)), _generated(batch)
            layers = [self._layer(kept, pools, *shared) for kept in layout.layers]
            for kept, layer in zip(layout.layers, layers, strict=True):
                if kept.pages is not None:
                    self.paged_layers[kept.pages] = layer
        self.num_layers = len(layers)
        super().__init__(layers=layers)

    def keep_causal(self, are_causal: Iterable[bool]) -> None:
        """Has some layers be causal where tokens of an image see each other in others."""
        for layer, is_causal in zip(self.layers, are_causal, strict=False):
            if isinstance(layer, PagedLayer):
                layer.is_causal = is_causal

    def _layer(self, kept: LayerPools, pools: tuple[Any, ...], segments: Segments, generated: jax.Array | None) -> Any:
        pages = None if kept.pages is None else self.paged_layers[kept.pages]
        if pages is not None and not kept.has_states:
            return pages
        convs = {index: pools[place] for index, place in kept.convs}
        recurrent = None if kept.recurrent is None else pools[kept.recurrent]
        if isinstance(pages, PagedLayerWithParts):
            raise NotPackableError("a layer with an indexer or compressed entries has a recurrent state, too")
        states = StateLayer(convs, recurrent, segments, generated, is_open=kept.is_open)
        return states if pages is None else PagedStateLayer(states, pages)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Returns None, so that steps of one token take the function that others take."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Returns a handle of the recurrent state.

        Raises:
            NotPackableError: the layer has none.
        """
        layer = self.layers[layer_idx]
        if not isinstance(layer, StateLayer):
            raise NotPackableError(f"the code asks for a recurrent state of layer {layer_idx}, which has pages alone")
        return layer.recurrent_handle()

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns False: whether a sequence has a state is data."""
        return False

    def pools(self) -> tuple[Any, ...]:
        """Returns the pools after the forward; with open layers pages, and states by layer.

        Raises:
            NotPackableError: a layer was written and not attended to by the op, so its tokens are lost.
        """
        if len(self.layers) != self.num_layers:
            raise NotPackableError(f"the code adds {len(self.layers) - self.num_layers} layers to its cache")
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PagedLayer) and not (layer.num_updates == 1 and layer.num_attended):
                raise NotPackableError(
                    f"layer {index} attends {layer.num_attended} times through transformers' attention interface "
                    f"and updates its cache {layer.num_updates} times"
                )
            if isinstance(layer, PagedLayerWithParts) and set(layer.num_part_updates.values()) != {1}:
                raise NotPackableError(f"layer {index} stores what it keeps, {layer.num_part_updates} times")
        of_pools: list[Any] = self.paged_layers
        parts = {place: jax_view(of_pools[layer].part_pools[name]) for layer, name, place in self._layout.parts}
        pages = tuple(parts.get(place, layer.pool) for place, layer in enumerate(of_pools))
        if not self._layout.layers:
            return pages
        states = [layer.results() if isinstance(layer, StateLayer) else ({}, None) for layer in self.layers]
        if any(kept.is_open for kept in self._layout.layers):
            return (*pages, *states)
        by_place: dict[int, Any] = dict(enumerate(pages))
        for kept, (convs, recurrent) in zip(self._layout.layers, states, strict=True):
            by_place |= {place: convs[index] for index, place in kept.convs}
            by_place |= {} if kept.recurrent is None else {kept.recurrent: recurrent}
        return tuple(by_place[place] for place in range(len(by_place)))

    @property
    def is_compileable(self) -> bool:
        """False: transformers would build 4D masks on the host for a cache that says yes."""
        return False


def _generated(batch: PackedBatch) -> jax.Array | None:
    """Returns which tokens were generated, bool[T]; None if all were."""
    if batch.prompt_lens is None:
        return None
    index = jnp.arange(len(batch.token_ids), dtype=jnp.int32)
    rows = jnp.minimum(num_at_most(batch.cu_q_lens[1:], index), len(batch.prompt_lens) - 1)
    return batch.positions >= batch.prompt_lens[rows]


def segments_of(batch: PackedBatch, num_rows: int) -> Segments:
    """Returns the segments of a step, on pools of `num_rows` states."""
    assert batch.slots is not None
    own = batch.cu_q_lens, batch.slots, batch.kv_lens > jnp.diff(batch.cu_q_lens)
    if batch.kept_lens is not None:
        return Segments.kept(*own, batch.kept_lens, num_rows)
    return Segments.of(*own) if batch.snapshots is None else Segments.cut(*own, batch.snapshots, num_rows)


def _num_state_rows(pools: tuple[Any, ...], layout: PagedLayout) -> int:
    """Returns the number of rows of the state pools, which follow those of pages; 0: none yet."""
    states = pools[len(layout.groups) :]
    return int(states[0].shape[0]) if states else 0


def attend_paged(
    query: torch.Tensor,
    key: torch.Tensor,
    write: PagedWrite,
    window: int | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None = None,
    distance_biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    token_sinks: torch.Tensor | None = None,
    value_begin: int | None = None,
    taken: TopTokens | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Runs the op for `query` [1, heads, T, dim]; returns [1, T, heads, v_dim].

    The new pool is stored in the layer of `write`. `window` is that of the model's mask; `alibi_slopes` are
    float32[heads]; `distance_biases` are weights [1, T, heads, R] and profiles [R, E]; `token_sinks` [1, heads, T, 1]
    are of each query; `value_begin` is the column of a key at which its value begins, if pages have no values beside
    the keys; `taken` are the tokens that an indexer has taken; in chunks of `chunk` tokens none sees those of another.
    """
    layer = write.layer
    reach = layer.layout.max_len if window is None else window
    # A mask without a window, over no more tokens than the layer's window has, hides nothing that the window shows.
    if layer.window is not None and reach > layer.window:
        raise NotPackableError(f"a layer with a window of {layer.window} has a mask with one of {window}")
    write.attend_with(key)
    # Turned before the batch of one is dropped: XLA does not see through a reshape that two turns are none.
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, write.values))  # [T, heads, dim]
    media = None if layer.is_causal else layer.batch.media
    sees_until = None if media is None else media.sees_until
    if taken is not None and taken.tokens is not None:
        if any(each is not None for each in (alibi_slopes, distance_biases, token_sinks, sees_until)):
            raise NotPackableError("an indexer takes tokens of a layer whose scores depend on more than causality")
        args = _sparse_args(layer, scale, softcap, sinks, value_begin)
        arrays = *map(jax_view, (q, k, v, layer.pages)), layer.rows, taken.tokens, args
        out, layer.pages = map(torch_view, sparse_attention(*arrays))
        return out[None]
    if chunk is not None:
        if distance_biases is not None or sees_until is not None:
            raise NotPackableError("attention in chunks whose scores depend on more than causality")
        window = None  # that of a chunk is no shorter than the chunk
    table, lens, starts = map(torch_view, _attended_rows(layer, chunk, q.shape[0]))
    features = {"scale": scale, "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, **layer.scales}
    features["value_begin"] = value_begin
    if distance_biases is not None:
        features["distance_weights"], features["distance_profiles"] = distance_biases[0][0], distance_biases[1]
    if token_sinks is not None:
        features["token_sinks"] = token_sinks[0, :, :, 0].T
    if layer.layout.is_decode:
        op = torch.ops.torchax_serve.decode_attention
        out, layer.pages = op(q, k, v, layer.pages, table, lens, sinks, **features)
    else:
        op = torch.ops.torchax_serve.paged_attention
        if sees_until is not None:
            features["sees_until"] = torch_view(sees_until)
        out, layer.pages = op(q, k, v, layer.pages, table, lens, starts, sinks, **features)
    return out[None]


def _attended_rows(layer: PagedLayer, chunk: int | None, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns page table, lengths and beginnings of the rows whose tokens see each other."""
    batch, page_size = layer.batch, layer.pages.shape[2]
    if chunk is None:
        return layer.table, batch.kv_lens, batch.cu_q_lens
    if chunk % page_size:
        raise NotPackableError(f"attention in chunks of {chunk} tokens, which pages of {page_size} do not divide")
    if layer.layout.is_decode:
        return *decode_chunks(layer.table, batch.kv_lens, chunk, page_size), batch.cu_q_lens
    return chunks_of_step(layer.table, batch.kv_lens, batch.cu_q_lens, num_tokens, chunk, page_size)


def _sparse_args(
    layer: PagedLayer, scale: float, softcap: float | None, sinks: torch.Tensor | None, value_begin: int | None
) -> AttentionArgs:
    scales = KVScales(*(jax_view(each) for each in layer.scales.values())) if layer.scales else None
    own_sinks = None if sinks is None else jax_view(sinks)
    return AttentionArgs(scale, softcap=softcap, sinks=own_sinks, kv_scales=scales, value_begin=value_begin)


def attend_latents(query: torch.Tensor, latent: LatentWrite, window: int | None, **features: Any) -> torch.Tensor:
    """Runs the op on latents for `query` [1, heads, T, dim]; returns [1, T, heads, v_dim].

    Queries are multiplied with what would make keys, the op's result with what would make values.
    """
    dim = latent.up_keys.shape[1]
    q = jax_view(query)[0]  # [heads, T, dim + rope dim]
    absorbed = by_head(q[..., :dim], jnp.swapaxes(latent.up_keys, 1, 2))
    absorbed = torch_view(jnp.concatenate([absorbed, q[..., dim:]], axis=-1)[None])
    key = torch.cat((latent.latents, latent.rotated), dim=-1)
    out = attend_paged(absorbed, key, PagedWrite(latent.write.layer, latent.latents), window, value_begin=0, **features)
    heads = jnp.swapaxes(jax_view(out)[0], 0, 1)
    return torch_view(jnp.swapaxes(by_head(heads, latent.up_values), 0, 1)[None])
