"""The paged KV cache inside a trace: many sequences as one packed row of tokens.

A packed forward sees ``[1, T]`` token ids, the new tokens of S sequences one after the other, each with its position.
Everything in a decoder but attention works on tokens one by one, so sequences meet only in the attention op, which is
told where each begins. The layers here refuse anything that does not go through that op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from transformers.cache_utils import Cache, CacheLayerMixin

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.errors import UnsupportedModelError


class NotPackableError(UnsupportedModelError):
    """An error of a model whose code does not let sequences be packed; the message says where."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """The new tokens of S sequences, padded to T tokens and S rows."""

    token_ids: jax.Array  # int32[T]
    positions: jax.Array  # int32[T]
    cu_q_lens: jax.Array  # int32[S + 1], where each sequence's tokens begin; the last entry is the end of all
    kv_lens: jax.Array  # int32[S], length of each sequence with its new tokens; 0 for an unused row
    last: jax.Array  # int32[S], index of each sequence's last token, whose logits are wanted
    page_tables: tuple[jax.Array, ...]  # by group of layers, int32[S, pages_per_seq]
    rope_lens: jax.Array | None = None  # int32[T], lengths that tokens' rotary frequencies are for


@dataclasses.dataclass(frozen=True)
class PagedLayout:
    """The static part of a packed step.

    Attributes:
        groups: by layer, the index of its page table.
        windows: by layer, its sliding window, None for full attention; pages before it may be freed.
        max_len: tokens that a page table covers.
        is_decode: every sequence has one new token: T = S, in the order of the rows.
        all_logits: logits of every token instead of each sequence's last.
    """

    groups: tuple[int, ...]
    windows: tuple[int | None, ...]
    max_len: int
    is_decode: bool = False
    all_logits: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Pool:
    """A layer's pages in int8, with a scale for each kv head.

    The values are ``round(x / scale)`` within -127 .. 127.
    """

    pages: jax.Array  # int8[pages, kv_heads, page_len, width]
    k_scale: jax.Array  # float32[kv_heads]
    v_scale: jax.Array  # float32[kv_heads]


Pool = jax.Array | Int8Pool


def pages_of(pool: Pool) -> jax.Array:
    """Returns the array with the pages of a pool."""
    return pool.pages if isinstance(pool, Int8Pool) else pool


def with_pages(pool: Pool, pages: jax.Array) -> Pool:
    """Returns a pool like `pool` with these pages."""
    return dataclasses.replace(pool, pages=pages) if isinstance(pool, Int8Pool) else pages


def laid_out(
    pool: Pool, sharding: Callable[[int], NamedSharding], place: Callable[[Any, NamedSharding], jax.Array]
) -> Pool:
    """Returns `pool` with each array placed by `place`.

    `sharding` returns the sharding of pages for a number of heads.
    """
    of_pages = sharding(pages_of(pool).shape[1])
    pages = place(pages_of(pool), of_pages)
    if not isinstance(pool, Int8Pool):
        return pages
    by_head = NamedSharding(of_pages.mesh, PartitionSpec(*of_pages.spec[1:2]))
    return Int8Pool(pages, place(pool.k_scale, by_head), place(pool.v_scale, by_head))


@dataclasses.dataclass
class PagedWrite:
    """A pending write, attached to the keys that ``cache.update`` returned.

    The op that receives these keys writes and attends.
    """

    layer: PagedLayer
    values: torch.Tensor  # [1, kv_heads, T, v_dim]


class PagedLayer(CacheLayerMixin):
    """One attention layer: a pool of pages, and the table of its sequences' pages.

    The pool is ``[pages, kv_heads, page_len, width]``.
    """

    supports_early_init = False

    def __init__(self, pool: Pool, batch: PackedBatch, table: jax.Array, window: int | None, layout: Any) -> None:
        self._given = pool
        self.pages: Any = torch_view(pages_of(pool))
        self.scales: dict[str, Any] = {}
        if isinstance(pool, Int8Pool):
            self.scales = {"k_scale": torch_view(pool.k_scale), "v_scale": torch_view(pool.v_scale)}
        self.batch, self.table, self.window, self.layout = batch, table, window, layout
        self.num_updates = 0
        self.num_attended = 0

    @property
    def pool(self) -> Pool:
        """The pool, with what has been written."""
        return with_pages(self._given, jax_view(self.pages))

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


class PagedTraceCache(Cache):
    """The cache as model code sees it in a packed trace."""

    def __init__(self, pools: tuple[Pool, ...], batch: PackedBatch, layout: PagedLayout) -> None:
        self.paged_layers = [
            PagedLayer(pool, batch, batch.page_tables[group], window, layout)
            for pool, group, window in zip(pools, layout.groups, layout.windows, strict=True)
        ]
        super().__init__(layers=list(self.paged_layers))

    def pools(self) -> tuple[Pool, ...]:
        """Returns the pools after the forward.

        Raises:
            NotPackableError: a layer was written and not attended to by the op, so its tokens are lost.
        """
        if len(self.layers) != len(self.paged_layers):
            raise NotPackableError(f"the code adds {len(self.layers) - len(self.paged_layers)} layers to its cache")
        for index, layer in enumerate(self.paged_layers):
            if not layer.num_updates == layer.num_attended == 1:
                raise NotPackableError(
                    f"layer {index} attends {layer.num_attended} times through transformers' attention interface "
                    f"and updates its cache {layer.num_updates} times"
                )
        return tuple(layer.pool for layer in self.paged_layers)

    @property
    def is_compileable(self) -> bool:
        """False: transformers would build 4D masks on the host for a cache that says yes."""
        return False


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
) -> torch.Tensor:
    """Runs the op for `query` [1, heads, T, dim]; returns [1, T, heads, v_dim].

    The new pool is stored in the layer of `write`. `window` is that of the model's mask; `alibi` float32[heads] are
    slopes.
    """
    layer = write.layer
    if layer.window is not None and (window is None or window > layer.window):
        raise NotPackableError(f"a layer with a window of {layer.window} has a mask with one of {window}")
    layer.num_attended += 1
    # Turned before the batch of one is dropped: XLA does not see through a reshape that two turns are none.
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, write.values))  # [T, heads, dim]
    table, lens, starts = (torch_view(x) for x in (layer.table, layer.batch.kv_lens, layer.batch.cu_q_lens))
    features = {"scale": scale, "window": window, "softcap": softcap, "alibi": alibi, **layer.scales}
    if layer.layout.is_decode:
        op = torch.ops.torchax_serve.decode_attention
        out, layer.pages = op(q, k, v, layer.pages, table, lens, sinks, **features)
    else:
        op = torch.ops.torchax_serve.paged_attention
        out, layer.pages = op(q, k, v, layer.pages, table, lens, starts, sinks, **features)
    return out[None]
