"""The layers of a paged cache inside a trace, as model code sees them.

They refuse anything that does not go through the op of attention, which is told where each sequence begins.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.cache_utils import CacheLayerMixin

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.index_handles import IndexKeys, IndexPages, TokenMask, TopTokens
from model_adapters.caches.packed_batch import (
    INDEX_KEYS,
    NotPackableError,
    PackedBatch,
    Pool,
    ScaledPool,
    pages_of,
    with_pages,
)
from model_adapters.caches.state_layer import StateLayer
from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.ops.compressed_attention import (
    compressed_attention,
    last_rows_of_blocks,
    write_entries,
)
from model_adapters.ops.sparse_attention import (
    PackedRows,
    last_rows,
    take_blocks,
    take_tokens,
    write_block_keys,
    write_index_keys,
)


@dataclasses.dataclass
class PagedWrite:
    """A pending write, attached to the keys that ``cache.update`` returned.

    The op that receives these keys writes and attends. Later layers may attend to the same ones (Gemma 3n): what they
    write once more is what is there.
    """

    layer: PagedLayer
    values: torch.Tensor  # [1, kv_heads, T, v_dim]
    _attended: tuple[Any, ...] = ()

    def attend_with(self, keys: torch.Tensor) -> None:
        """Counts an attention of the layer.

        Raises:
            NotPackableError: other keys or values would take the place of those that were attended to.
        """
        given = jax_view(keys), jax_view(self.values)
        if self.layer.num_attended and not (self._attended and all(map(operator.is_, given, self._attended))):
            raise NotPackableError("two layers attend to different keys or values in one place of the cache")
        self._attended = given
        self.layer.num_attended += 1


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
        self.is_causal = False  # also where tokens of an image see each other in other layers
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
        """Returns sizes as if all positions were stored: only the window of a mask matters here.

        A step may have more tokens than a sequence: DeepSeek-V4 widens a mask that is narrower than its keys, and what
        is known of the mask would be lost.
        """
        return max(self.layout.max_len, query_length), 0

    def get_seq_length(self) -> int:
        """Returns 0: the sequences have no common length, and positions are given."""
        return 0

    def get_max_length(self) -> int:
        """Returns the number of tokens that a sequence can have."""
        return int(self.layout.max_len)


class PagedLayerWithParts(PagedLayer):
    """An attention layer that keeps more than keys and values, in pages of its own."""

    def __init__(self, pages: PagedLayer, parts: Mapping[str, PagedLayer]) -> None:
        vars(self).update(vars(pages))
        self.part_pools: dict[str, Any] = {name: part.pages for name, part in parts.items()}
        self.part_tables = {name: part.table for name, part in parts.items()}
        self.num_part_updates = dict.fromkeys(parts, 0)

    def part(self, name: str) -> jax.Array:
        """Returns the pool of a part."""
        return jax_view(self.part_pools[name])

    def write_part(self, name: str, pool: jax.Array) -> None:
        """Takes the pool of a part with what was written."""
        self.part_pools = {**self.part_pools, name: torch_view(pool)}
        self.num_part_updates = {**self.num_part_updates, name: self.num_part_updates[name] + 1}

    def rows_of(self, name: str, row_len: int = 1) -> PackedRows:
        """Returns the sequences of the step with the pages of a part, a row of `row_len` tokens."""
        page_size = self.pages.shape[2] if row_len > 1 else None
        return dataclasses.replace(self.rows, page_table=self.part_tables[name], page_size=page_size, row_len=row_len)


class PagedIndexedLayer(PagedLayerWithParts):
    """An attention layer with an indexer, whose keys are in the places of the layer's own pages."""

    def update_indexer(self, indexer_key_states: torch.Tensor) -> IndexKeys:
        """Writes the new tokens' index keys [1, T, dim]; returns a handle of those of all tokens."""
        keys, rows, pages = self._written(indexer_key_states), self.rows, self.part(INDEX_KEYS)
        capacity = self.layout.max_len
        window = None if self.window is None or self.window >= capacity else self.window

        def take(q: jax.Array, weights: jax.Array, scale: float, num_taken: int) -> jax.Array:
            return take_tokens(q, weights, pages, rows, scale=scale, num_taken=num_taken, window=window)

        num_tokens, dim = keys.shape
        return IndexKeys(IndexPages(take, num_tokens, capacity, window), (1, capacity, dim))

    def _written(self, tokens: torch.Tensor) -> jax.Array:
        """Writes what the indexer keeps of the new tokens [1, T, width]; returns [T, width]."""
        if self.num_part_updates[INDEX_KEYS] or tokens.shape[0] != 1:
            raise NotPackableError("a layer's indexer stores keys twice, or of a batch of its own making")
        own = jax_view(tokens)[0]
        self.write_part(INDEX_KEYS, write_index_keys(own, self.part(INDEX_KEYS), self.rows))
        return own

    @property
    def indexer_position_ids(self) -> None:
        """None: an indexer of blocks keeps what it needs of positions beside its keys."""

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        """Does nothing."""

    def update_block_indexer(self, tokens: torch.Tensor, block_size: int) -> torch.Tensor:
        """Writes what an indexer keeps of the new tokens [1, T, width].

        Returns:
            The same of the block that ends with each token, [1, T, block_size, width].
        """
        num_tokens, width = self._written(tokens).shape
        blocks = last_rows(self.part(INDEX_KEYS), self.rows, num_tokens, block_size)
        found: torch.Tensor = torch_view(blocks[None, ..., :width])
        return found

    def take_blocks(self, queries: torch.Tensor, keys: torch.Tensor, num_blocks: int, block_size: int) -> TokenMask:
        """Writes keys of blocks [1, T, dim], by last tokens; returns a mask of what `queries` take.

        Queries [1, T, heads, dim] take the tokens of `num_blocks` complete blocks, and those behind the last one.
        """
        if self.window is not None:
            raise NotPackableError("an indexer of blocks stands in a layer with a window")
        pages, taken = write_block_keys(jax_view(keys)[0], self.part(INDEX_KEYS), self.rows, block_size), None
        self.part_pools = {INDEX_KEYS: torch_view(pages)}
        if num_blocks * block_size < self.layout.max_len:
            q = jax_view(queries)[0].astype(jnp.float32)
            taken = take_blocks(q, pages, self.rows, num_blocks=num_blocks, block_size=block_size)
        return TokenMask(TopTokens(taken, None), hides_taken=False)


@dataclasses.dataclass
class CompletedBlocks:
    """Blocks that the new tokens of a step complete, M of them at most.

    Attributes:
        tokens: What a block's tokens have, and those in front of them, [1, M, count, width].
        positions: int32[M], of the last token of each; -1: there is no such block.
        seqs: int32[M].
    """

    tokens: torch.Tensor
    positions: jax.Array
    seqs: jax.Array


class PagedCompressedLayer(PagedLayerWithParts):
    """An attention layer with entries that compress blocks of tokens.

    A compressor has pages of the tokens that its next entries are made of, and of its entries.
    """

    def store_tokens(self, name: str, tokens: torch.Tensor, rate: int, count: int) -> CompletedBlocks:
        """Writes new tokens [1, T, width]; returns the last `count` ones of each completed block."""
        part, own = f"{name} tokens", jax_view(tokens)[0]
        rows = self.rows_of(part)
        self.write_part(part, write_index_keys(own, self.part(part), rows))
        found, seqs, positions = last_rows_of_blocks(self.part(part), rows, len(own), rate, count)
        return CompletedBlocks(torch_view(found[None, ..., : own.shape[1]]), positions, seqs)

    def store_entries(self, name: str, entries: torch.Tensor, blocks: CompletedBlocks, rate: int) -> None:
        """Writes the entries [1, M, dim] of blocks."""
        part, own = f"{name} entries", jax_view(entries)[0]
        rows = self.rows_of(part, rate)
        self.write_part(part, write_entries(own, self.part(part), rows, blocks.seqs, blocks.positions))

    def take_entries(
        self, queries: torch.Tensor, weights: torch.Tensor, scale: float, num_taken: int, rate: int
    ) -> jax.Array | None:
        """Returns numbers of the blocks that queries take, int32[T, n]; None for all.

        Queries are [1, T, heads, dim], `weights` [1, T, heads]; the scores are those of `take_tokens`.
        """
        if num_taken >= self.layout.max_len // rate:
            return None
        q, by_head = (jax_view(x)[0].astype(jnp.float32) for x in (queries, weights))
        rows, options = self.rows_of("indexer entries", rate), {"num_taken": num_taken, "block_size": rate}
        return take_tokens(q, by_head, self.part("indexer entries"), rows, scale=scale, **options)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, taken: jax.Array | None, rate: int, args: AttentionArgs
    ) -> torch.Tensor:
        """Writes keys [1, 1, T, dim]; returns attention [1, T, heads, dim].

        `query` is [1, heads, T, dim].
        """
        self.num_attended += 1
        rows = self.rows_of("compressor entries", rate)
        q, k = (jax_view(each.transpose(1, 2))[0] for each in (query, key))
        given = q, k, jax_view(self.pages), self.rows, self.part("compressor entries"), rows, taken, args
        out, pages = compressed_attention(*given)
        self.pages = torch_view(pages)
        made: torch.Tensor = torch_view(out[None])
        return made


def with_parts(pages: PagedLayer, parts: Mapping[str, PagedLayer]) -> PagedLayer:
    """Returns the layer of `pages` that keeps `parts`, too, each in pages of its own."""
    return (PagedIndexedLayer if INDEX_KEYS in parts else PagedCompressedLayer)(pages, parts)


class PagedStateLayer(StateLayer, PagedLayer):  # type: ignore[override]  # as transformers' own
    """A layer with pages and states (Falcon-H1)."""

    def __init__(self, states: StateLayer, pages: PagedLayer) -> None:
        vars(self).update(vars(states) | vars(pages))

    lazy_initialization = StateLayer.lazy_initialization
