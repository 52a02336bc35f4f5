"""Inputs of a packed step and the pools that it reads and writes; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from model_adapters.errors import UnsupportedModelError

INDEX_KEYS = "index keys"
"""What a layer with an indexer keeps besides keys and values."""


class NotPackableError(UnsupportedModelError):
    """An error of a model whose code does not let sequences be packed; the message says where."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MediaTokens:
    """What the tokens of a step have of images and audio.

    F is the number of features, axes that of the positions of a token.
    """

    features: jax.Array  # float[F, width], in place of the embeddings of placeholder tokens
    index: jax.Array  # int32[T], row of `features`; -1: a token of text
    positions: jax.Array | None  # int32[axes, T], for rotary embeddings; None: as those of text
    sees_until: jax.Array | None  # int32[T], last position that a token sees if that is behind its own; None: no token


# The packed layout: the new tokens of all rows of a step stand one after the other in one row of T tokens, which model
# code sees as a batch of 1 (flash-attention's varlen layout). A row is a chunk of a prompt, a token that is decoded, or
# a last token with its drafts. T and S are buckets, so both are padded. Row A with 3 new tokens from position 5 on, and
# row B with one at position 9, for T = 6 and S = 3:
#
#     token_ids    a5 a6 a7 b9 b9 b9    padding repeats the last token: kernels compute equal rows once
#     positions     5  6  7  9  9  9
#     cu_q_lens     0  3  4  4          row s has the tokens cu_q_lens[s] to cu_q_lens[s + 1]; an unused one has none
#     kv_lens       8 10  0             tokens of each sequence, the new ones among them
#     last          2  3  3             the token of each row whose logits are sampled
#
# Invariants: the tokens of a row have consecutive positions, the last one kv_lens[s] - 1. Keys and values of a token go
# to page page_tables[group][s, position // page_size], at place position % page_size. A padding token writes nothing,
# and no other token depends on it. Rows in use stand in front of unused ones. In a decode step T = S, and token s is
# row s.


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
    deltas: jax.Array | None = None  # int32[T], position for rotary embeddings minus position; None: zeros
    media: MediaTokens | None = None
    adapters: jax.Array | None = None  # int32[T], adapter of each token, 0 for none; None if there are none
    slots: jax.Array | None = None  # int32[S], slot of each sequence; None: nothing is kept by slot
    prompt_lens: jax.Array | None = None  # int32[S], tokens of each sequence that were given; None: all were generated
    kept_lens: jax.Array | None = None  # int32[S], tokens behind which states are kept; None: behind all
    snapshots: jax.Array | None = None  # int32[3, S], as `Segments.cut` takes them; None: there are none


@dataclasses.dataclass(frozen=True)
class LayerPools:
    """What one layer of a model keeps, as places in the pools of a step.

    Attributes:
        pages: place of its pages; None: it does not attend.
        convs: by state index, places of the last inputs of its convolutions.
        recurrent: place of its recurrent state; None: it has none.
        is_open: its states are not known yet: the step makes them, of zeros.
    """

    pages: int | None = None
    convs: tuple[tuple[int, int], ...] = ()
    recurrent: int | None = None
    is_open: bool = False

    @property
    def has_states(self) -> bool:
        """Whether tokens change a state of this layer."""
        return bool(self.convs) or self.recurrent is not None or self.is_open


@dataclasses.dataclass(frozen=True)
class PagedLayout:
    """The static part of a packed step.

    Attributes:
        groups: by pool of pages, the index of its page table.
        windows: by pool of pages, its sliding window, None for full attention; pages before it may be freed.
        max_len: tokens that a page table covers.
        is_decode: every sequence has one new token: T = S, in the order of the rows.
        all_logits: logits of every token instead of each sequence's last.
        layers: by layer of the model, what it keeps; empty: layer i keeps the pages of pool i.
        parts: what layers keep besides keys and values, such as keys of indexers: the pool of a layer's pages, what it
            is, and the pool of that, which is behind those of all layers.
    """

    groups: tuple[int, ...]
    windows: tuple[int | None, ...]
    max_len: int
    is_decode: bool = False
    all_logits: bool = False
    layers: tuple[LayerPools, ...] = ()
    parts: tuple[tuple[int, str, int], ...] = ()

    def without_last(self, num_pools: int) -> PagedLayout:
        """Returns the layout without the last pools of pages, as those of a draft head."""
        left = len(self.groups) - num_pools
        parts = tuple(part for part in self.parts if part[2] < left)
        return dataclasses.replace(self, groups=self.groups[:left], windows=self.windows[:left], parts=parts)

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state by slot besides pages."""
        return any(layer.has_states for layer in self.layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledPool:
    """A layer's pages in 8 bits, with a scale for each kv head.

    The values are ``x / scale``, rounded to int8 or float8_e4m3fn.
    """

    pages: jax.Array  # int8 or float8_e4m3fn[pages, kv_heads, page_size, width]
    k_scale: jax.Array  # float32[kv_heads]
    v_scale: jax.Array  # float32[kv_heads]


Pool = jax.Array | ScaledPool


def pages_of(pool: Pool) -> jax.Array:
    """Returns the array with the pages of a pool."""
    return pool.pages if isinstance(pool, ScaledPool) else pool


def with_pages(pool: Pool, pages: jax.Array) -> Pool:
    """Returns a pool like `pool` with these pages."""
    return dataclasses.replace(pool, pages=pages) if isinstance(pool, ScaledPool) else pages


def laid_out(
    pool: Pool, sharding: Callable[[int], NamedSharding], place: Callable[[Any, NamedSharding], jax.Array]
) -> Pool:
    """Returns `pool` with each array placed by `place`.

    `sharding` returns the sharding of pages for a number of heads.
    """
    of_pages = sharding(pages_of(pool).shape[1])
    pages = place(pages_of(pool), of_pages)
    if not isinstance(pool, ScaledPool):
        return pages
    by_head = NamedSharding(of_pages.mesh, PartitionSpec(*of_pages.spec[1:2]))
    return ScaledPool(pages, place(pool.k_scale, by_head), place(pool.v_scale, by_head))
