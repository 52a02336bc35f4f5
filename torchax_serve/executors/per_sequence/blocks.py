"""Chunks of a prompt in blocks: several forwards of one request in one program.

Code that loops over tokens in Python makes programs that grow with every token; a block bounds them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from model_adapters.caches.packed_batch import MediaTokens
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.kv_cache.cache_layout import CacheLayout, Leaves
from torchax_serve.kv_cache.pools import PagedLayerSpec


class BlockForward(Protocol):
    """The forwards of one request, as `SequenceForward` has them."""

    def prefill(self, *args: Any, **how: Any) -> Any:
        """Computes the first tokens of a prompt."""

    def extend(self, *args: Any, **how: Any) -> Any:
        """Computes tokens behind others."""


def begin_in_blocks(
    forward: BlockForward,
    weights: Weights,
    ids: jax.Array,
    layout: CacheLayout,
    hidden: jax.Array | None,
    source_len: Any,
    block_len: int,
    how: dict[str, Any],
) -> Any:
    """Computes a prompt as `SequenceForward.prefill`, in blocks of `block_len` tokens."""
    begin = how | {"media": _part(how["media"], 0, block_len)}
    first_logits, first = forward.prefill(weights, ids[:block_len], block_len, layout, hidden, source_len, **begin)
    how = how | {"media": _part(how["media"], block_len, ids.shape[0])}
    room = ((0, 0), (0, 0), (0, ids.shape[0] - block_len), (0, 0))
    leaves = tuple(
        jnp.pad(jnp.swapaxes(new, 0, 1)[None], room) if isinstance(kind, PagedLayerSpec) else new
        for new, kind in zip(first, layout.leaves, strict=True)
    )
    logits, news = extend_in_blocks(
        forward, weights, leaves, jnp.int32(block_len), ids[block_len:], layout, source_len, block_len, how
    )
    both = [
        jnp.concatenate([old, new]) if isinstance(kind, PagedLayerSpec) else new
        for old, new, kind in zip(first, news, layout.leaves, strict=True)
    ]
    return jnp.concatenate([first_logits, logits]) if how["all_logits"] else logits, tuple(both)


def extend_in_blocks(
    forward: BlockForward,
    weights: Weights,
    leaves: Leaves,
    offset: jax.Array,
    ids: jax.Array,
    layout: CacheLayout,
    source_len: Any,
    block_len: int,
    how: dict[str, Any],
) -> Any:
    """Computes tokens as `SequenceForward.extend`, one block of `block_len` tokens at a time."""
    media, in_pools = how["media"], how.get("table") is not None

    # The carry is what the cache has of the request, with the blocks so far, and the number of tokens in it: dense keys
    # and values get the block's at that offset, a state is the one behind the block, and pools have been written by the
    # forward. Only of dense keys and values what is new comes out by block: the other leaves are those behind the last
    # one.
    def step(carry: tuple[Leaves, jax.Array], block: tuple[jax.Array, ...]) -> Any:
        leaves, offset = carry
        own = how if media is None else how | {"media": _block(media, block[1:])}
        logits, news = forward.extend(weights, leaves, offset, block[0], block_len, layout, source_len, **own)
        following, added = [], []
        for leaf, new, kind in zip(leaves, news, layout.leaves, strict=True):
            is_pages = isinstance(kind, PagedLayerSpec) and not in_pools
            row = jnp.swapaxes(new, 0, 1)[None].astype(leaf.dtype) if is_pages else new
            following.append(jax.lax.dynamic_update_slice_in_dim(leaf, row, offset, axis=2) if is_pages else new)
            added.append(new if is_pages else ())
        return (tuple(following), offset + block_len), (logits, tuple(added))

    blocks = (ids.reshape(-1, block_len), *_blocks(media, block_len))
    (leaves, _), (logits, added) = jax.lax.scan(step, (leaves, offset), blocks)
    logits = logits.reshape(-1, logits.shape[-1]) if how["all_logits"] else logits[-1]
    news = [
        new.reshape(-1, *new.shape[2:]) if isinstance(kind, PagedLayerSpec) and not in_pools else leaf
        for leaf, new, kind in zip(leaves, added, layout.leaves, strict=True)
    ]
    return logits, tuple(news)


def _part(media: MediaTokens | None, begin: int, end: int) -> MediaTokens | None:
    """Returns the media of some tokens of a chunk."""
    if media is None:
        return None
    positions = None if media.positions is None else media.positions[:, begin:end]
    return dataclasses.replace(media, index=media.index[begin:end], positions=positions)


def _blocks(media: MediaTokens | None, block_len: int) -> tuple[jax.Array, ...]:
    """Returns indices int32[blocks, block_len], and positions if there are any.

    Positions are int32[blocks, axes, block_len].
    """
    if media is None:
        return ()
    index = media.index.reshape(-1, block_len)
    if media.positions is None:
        return (index,)
    return index, jnp.moveaxis(media.positions.reshape(len(media.positions), -1, block_len), 1, 0)


def _block(media: MediaTokens, block: tuple[jax.Array, ...]) -> MediaTokens:
    """Returns the media of a block of `_blocks`."""
    return dataclasses.replace(media, index=block[0], positions=block[1] if len(block) > 1 else None)
