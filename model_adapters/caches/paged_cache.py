"""The paged KV cache inside a trace: many sequences as one packed row of tokens.

A packed forward sees ``[1, T]`` token ids, the new tokens of S sequences one after the other, each with its position.
Everything in a decoder but attention works on tokens one by one, so sequences meet only in the attention op, which is
told where each begins. The layers here refuse anything that does not go through that op.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.index_handles import IndexKeys, IndexPages, TopTokens
from model_adapters.caches.packed_batch import (
    LayerPools,
    NotPackableError,
    PackedBatch,
    PagedLayout,
    Pool,
    ScaledPool,
    pages_of,
    with_pages,
)
from model_adapters.caches.state_layer import StateLayer
from model_adapters.ops.attention_args import AttentionArgs, KVScales
from model_adapters.ops.grouped_matmul import by_head
from model_adapters.ops.searchsorted import num_at_most
from model_adapters.ops.segments import Segments
from model_adapters.ops.sparse_attention import PackedRows, sparse_attention, take_tokens, write_index_keys


@dataclasses.dataclass
class PagedWrite:
    """A pending write, attached to the keys that ``cache.update`` returned.

    The op that receives these keys writes and attends.
    """

    layer: PagedLayer
    values: torch.Tensor  # [1, kv_heads, T, v_dim]


@dataclasses.dataclass
class LatentWrite:
    """A pending write of latents, attached to the keys that model code has made of them.

    Attributes:
        write: Of the latents.
        latents: [1, 1, T, latent dim].
        rotated: [1, 1, T, rope dim], the part of a key that all heads share, its last columns.
        values: The values that were made with the keys.
        up_keys: [heads, dim, latent dim], the first columns of a key from a latent.
        up_values: [heads, v_dim, latent dim], a value from a latent.
    """

    write: PagedWrite
    latents: torch.Tensor
    rotated: torch.Tensor
    values: torch.Tensor
    up_keys: jax.Array
    up_values: jax.Array


class PagedLayer(CacheLayerMixin):
    """One attention layer: a pool of pages, and the table of its sequences' pages.

    The pool is ``[pages, kv_heads, page_size, width]``.
    """

    supports_early_init = False

    def __init__(self, pool: Pool, batch: PackedBatch, table: jax.Array, window: int | None, layout: Any) -> None:
        self._given = pool
        self.pages: Any = torch_view(pages_of(pool))
        self.scales: dict[str, Any] = {}
        if isinstance(pool, ScaledPool):
            self.scales = {"k_scale": torch_view(pool.k_scale), "v_scale": torch_view(pool.v_scale)}
        self.batch, self.table, self.window, self.layout = batch, table, window, layout
        self.num_updates = 0
        self.num_attended = 0

    @property
    def pool(self) -> Pool:
        """The pool, with what has been written."""
        return with_pages(self._given, jax_view(self.pages))

    @property
    def rows(self) -> PackedRows:
        """The sequences of the step."""
        batch = self.batch
        return PackedRows(self.table, batch.kv_lens, batch.cu_q_lens, self.layout.is_decode)

    @property
    def is_sliding(self) -> bool:
        """Whether only the last `window` positions are ever attended to."""
        return self.window is not None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """True: the pool is there."""
        return True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new keys and values, annotated; they reach the pool through the attention op."""
        if self.num_updates or key_states.shape[0] != 1:
            raise NotPackableError("a layer's cache is updated twice, or with a batch of its own making")
        self.num_updates += 1
        key_states.paged_write = PagedWrite(self, value_states)  # type: ignore[attr-defined]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns sizes as if all positions were stored: only the window of a mask matters here."""
        return self.layout.max_len, 0

    def get_seq_length(self) -> int:
        """Returns 0: the sequences have no common length, and positions are given."""
        return 0

    def get_max_length(self) -> int:
        """Returns the number of tokens that a sequence can have."""
        return int(self.layout.max_len)


class PagedIndexedLayer(PagedLayer):
    """An attention layer with an indexer, whose keys have pages of their own.

    These are ``[pages, 1, page_size, width]``, in the places of the layer's own pages.
    """

    def __init__(self, pages: PagedLayer, index_pool: Pool) -> None:
        vars(self).update(vars(pages))
        self.index_pages: Any = torch_view(index_pool)
        self.num_indexed = 0

    def update_indexer(self, indexer_key_states: torch.Tensor) -> IndexKeys:
        """Writes the new tokens' index keys [1, T, dim]; returns a handle of those of all tokens."""
        if self.num_indexed or indexer_key_states.shape[0] != 1:
            raise NotPackableError("a layer's indexer stores keys twice, or of a batch of its own making")
        self.num_indexed += 1
        keys, rows = jax_view(indexer_key_states)[0], self.rows
        self.index_pages = torch_view(write_index_keys(keys, jax_view(self.index_pages), rows))
        pages, capacity = jax_view(self.index_pages), self.layout.max_len
        window = None if self.window is None or self.window >= capacity else self.window

        def take(q: jax.Array, weights: jax.Array, scale: float, num_taken: int) -> jax.Array:
            return take_tokens(q, weights, pages, rows, scale=scale, num_taken=num_taken, window=window)

        num_tokens, dim = keys.shape
        return IndexKeys(IndexPages(take, num_tokens, capacity, window), (1, capacity, dim))


class PagedStateLayer(StateLayer, PagedLayer):  # type: ignore[override]  # as transformers' own
    """A layer with pages and states (Falcon-H1)."""

    def __init__(self, states: StateLayer, pages: PagedLayer) -> None:
        vars(self).update(vars(states) | vars(pages))

    lazy_initialization = StateLayer.lazy_initialization


class PagedTraceCache(Cache):
    """The cache as model code sees it in a packed trace."""

    def __init__(self, pools: tuple[Pool, ...], batch: PackedBatch, layout: PagedLayout) -> None:
        self._layout = layout
        self.paged_layers = [
            PagedLayer(pool, batch, batch.page_tables[group], window, layout)
            for pool, group, window in zip(pools, layout.groups, layout.windows, strict=False)
        ]
        of_indexers = {place for _, place in layout.indexers}
        for layer, place in layout.indexers:
            self.paged_layers[layer] = PagedIndexedLayer(self.paged_layers[layer], pools[place])
        layers: list[Any] = [each for place, each in enumerate(self.paged_layers) if place not in of_indexers]
        if layout.layers:
            shared = segments_of(batch, _num_state_rows(pools, layout)), _generated(batch)
            layers = [self._layer(kept, pools, *shared) for kept in layout.layers]
            self.paged_layers = [layer for layer in layers if isinstance(layer, PagedLayer)]
        self.num_layers = len(layers)
        super().__init__(layers=layers)

    def _layer(self, kept: LayerPools, pools: tuple[Any, ...], segments: Segments, generated: jax.Array | None) -> Any:
        pages = None if kept.pages is None else self.paged_layers[kept.pages]
        if pages is not None and not kept.has_states:
            return pages
        convs = {index: pools[place] for index, place in kept.convs}
        recurrent = None if kept.recurrent is None else pools[kept.recurrent]
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
            if isinstance(layer, PagedLayer) and not layer.num_updates == layer.num_attended == 1:
                raise NotPackableError(
                    f"layer {index} attends {layer.num_attended} times through transformers' attention interface "
                    f"and updates its cache {layer.num_updates} times"
                )
            if isinstance(layer, PagedIndexedLayer) and layer.num_indexed != 1:
                raise NotPackableError(f"the indexer of layer {index} stores its keys {layer.num_indexed} times")
        pages = tuple(layer.pool for layer in self.paged_layers)
        if self._layout.indexers:
            of_layers: Any = self.layers
            indexes = {place: jax_view(of_layers[layer].index_pages) for layer, place in self._layout.indexers}
            pages = tuple(indexes.get(place, pool) for place, pool in enumerate(pages))
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
    alibi: torch.Tensor | None = None,
    distance_biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    value_begin: int | None = None,
    taken: TopTokens | None = None,
) -> torch.Tensor:
    """Runs the op for `query` [1, heads, T, dim]; returns [1, T, heads, v_dim].

    The new pool is stored in the layer of `write`. `window` is that of the model's mask; `alibi` float32[heads] are
    slopes; `distance_biases` are weights [1, T, heads, R] and profiles [R, E]; `value_begin` is the column of a key at
    which its value begins, if pages have no values beside the keys; `taken` are the tokens that an indexer has taken.
    """
    layer = write.layer
    reach = layer.layout.max_len if window is None else window
    # A mask without a window, over no more tokens than the layer's window has, hides nothing that the window shows.
    if layer.window is not None and reach > layer.window:
        raise NotPackableError(f"a layer with a window of {layer.window} has a mask with one of {window}")
    layer.num_attended += 1
    # Turned before the batch of one is dropped: XLA does not see through a reshape that two turns are none.
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, write.values))  # [T, heads, dim]
    media = layer.batch.media
    if taken is not None and taken.tokens is not None:
        if alibi is not None or distance_biases is not None or (media is not None and media.sees_until is not None):
            raise NotPackableError("an indexer takes tokens of a layer whose scores depend on more than causality")
        args = _sparse_args(layer, scale, softcap, sinks, value_begin)
        arrays = *map(jax_view, (q, k, v, layer.pages)), layer.rows, taken.tokens, args
        out, layer.pages = map(torch_view, sparse_attention(*arrays))
        return out[None]
    table, lens, starts = (torch_view(x) for x in (layer.table, layer.batch.kv_lens, layer.batch.cu_q_lens))
    features = {"scale": scale, "window": window, "softcap": softcap, "alibi": alibi, **layer.scales}
    features["value_begin"] = value_begin
    if distance_biases is not None:
        features["distance_weights"], features["distance_profiles"] = distance_biases[0][0], distance_biases[1]
    if layer.layout.is_decode:
        op = torch.ops.torchax_serve.decode_attention
        out, layer.pages = op(q, k, v, layer.pages, table, lens, sinks, **features)
    else:
        op = torch.ops.torchax_serve.paged_attention
        if media is not None and media.sees_until is not None:
            features["sees_until"] = torch_view(media.sees_until)
        out, layer.pages = op(q, k, v, layer.pages, table, lens, starts, sinks, **features)
    return out[None]


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
