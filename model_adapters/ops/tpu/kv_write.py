"""The write of new tokens into a pool in 8 bits, which XLA does not do in place on TPUs.

Four rows of bytes share a 32-bit row of memory, and 32 form a tile. XLA's scatter needs another tiling than the pool
has as an argument of a program and would copy the pool twice. So a kernel reads the tiles that get new rows, inserts
the rows and writes the tiles back. It works on groups of tiles: one group is read while the last one is written.

Pools in 16 and 32 bits are written by the scatter of :mod:`model_adapters.ops.kv_pool`, which stays in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model_adapters.ops.attention_args import KVScales
from model_adapters.ops.kv_pool import quantize, write_tokens_at
from model_adapters.ops.tpu.page_buffers import tile_rows

MAX_GROUP_BYTES = 2 << 20  # of a group of tiles in vector memory
MAX_GROUP = 32  # tiles in a group
FIELDS = ("page", "begin", "row", "count")


def write_tokens(
    pool: jax.Array,
    page_table: jax.Array,
    seqs: jax.Array,
    positions: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_scales: KVScales | None,
    *,
    in_runs: bool,
) -> jax.Array:
    """Writes new tokens into a pool, in place if it is donated.

    The reference is :func:`model_adapters.ops.kv_pool.write_tokens_at`.

    Args:
        pool: ``[P, H, page, W]``.
        page_table: ``int32[S, pages_per_seq]``.
        seqs: ``int32[T]``, the row of `page_table` that each token belongs to; ascending.
        positions: ``int32[T]``; one that is on no page of the pool writes nothing.
        k: ``[T, H, D]``.
        v: ``[T, H, Dv]``.
        kv_scales: Scales of a pool in 8 bits, ``float32[H]`` each.
        in_runs: Tokens of one sequence follow each other; else each sequence has at most one token.
    """
    if kv_scales is None:
        return write_tokens_at(pool, page_table, seqs, positions, k, v)
    num_pages, _, page, width = pool.shape
    column = positions // page
    entry = jnp.clip(seqs, 0, page_table.shape[0] - 1), jnp.clip(column, 0, page_table.shape[1] - 1)
    pages = page_table[entry]
    writable = (positions >= 0) & (column < page_table.shape[1]) & (pages >= 0) & (pages < num_pages)
    halves = quantize(k, kv_scales.k, pool.dtype), quantize(v, kv_scales.v, pool.dtype)
    rows = jnp.concatenate(halves, axis=-1)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, width - rows.shape[2])))
    pages = jnp.where(writable, pages, -1)
    if in_runs:
        tiles, images = _runs(pages, positions % page, seqs, rows, page_table.shape[0])
    else:
        tile = tile_rows(pool.dtype)
        inside = positions % page
        tiles = jnp.stack([pages, inside // tile * tile, inside % tile, jnp.ones_like(pages)], axis=1)
        images = rows.astype(_word(rows.dtype))
    return _write(pool, tiles, images)


def _runs(
    pages: jax.Array, inside: jax.Array, seqs: jax.Array, rows: jax.Array, num_seqs: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the tiles that runs of tokens touch and their new rows.

    Args:
        pages: ``int32[T]``, the page of each token; -1 writes nothing.
        inside: ``int32[T]``, its position in the page.
        seqs: ``int32[T]``, its sequence, ascending.
        rows: ``[T, H, W]`` in 8 bits.
        num_seqs: Number of sequences.

    Returns:
        ``int32[n, fields]`` and ``[n, H, tile, W]`` in 8 bits.
    """
    num_tokens, tile = rows.shape[0], tile_rows(rows.dtype)
    changes = (seqs != jnp.roll(seqs, 1)) | (pages != jnp.roll(pages, 1)) | (inside % tile == 0)
    changes = changes.at[0].set(True)
    # Each sequence begins one tile and each 32 tokens end one; unwritten tokens follow written ones at most once each.
    most = min(num_tokens, num_tokens // tile + 2 * num_seqs + 2)
    begin = jnp.nonzero(changes, size=most, fill_value=num_tokens)[0].astype(jnp.int32)
    count = jnp.append(begin[1:], jnp.int32(num_tokens)) - begin
    first = jnp.minimum(begin, num_tokens - 1)
    row = inside[first] % tile
    page = jnp.where(count > 0, pages[first], -1)
    tokens = jnp.clip(begin[:, None] + jnp.arange(tile, dtype=jnp.int32) - row[:, None], 0, num_tokens - 1)
    images = jnp.swapaxes(rows[tokens], 1, 2)
    return jnp.stack([page, inside[first] // tile * tile, row, count], axis=1), images


def _word(dtype: Any) -> Any:
    """Returns the dtype of 32 bits in which rows of 8 bits are selected.

    Each of their numbers exists in it.
    """
    return jnp.int32 if dtype == jnp.int8 else jnp.float32


@dataclass(frozen=True)
class _Tiles:
    """The tiles of a call, and two buffers of one group of tiles each."""

    fields: Any  # int32[groups * group * fields]
    pool: Any
    buffer: Any  # [2, group, H, tile, W]
    reads: Any  # DMA[2]
    writes: Any  # DMA[2]

    def _each(self, group: Any, action: Any) -> None:
        size = self.buffer.shape[1]

        def one(i: Any, _: None) -> None:
            page, begin, row, count = (self.fields[(group * size + i) * len(FIELDS) + f] for f in range(len(FIELDS)))

            @pl.when(page >= 0)
            def _valid() -> None:
                tile = self.buffer.shape[3]
                there = self.pool.at[jnp.maximum(page, 0), :, pl.ds(pl.multiple_of(begin, tile), tile)]
                action(i, there, row, count)

        lax.fori_loop(0, size, one, None)

    def read(self, group: Any, *, wait: bool) -> None:
        """Starts the reads of the tiles of `group`, or waits for them."""
        half = group % 2

        def copy(i: Any, there: Any, *_: Any) -> None:
            dma = pltpu.make_async_copy(there, self.buffer.at[half, i], self.reads.at[half])
            dma.wait() if wait else dma.start()

        self._each(group, copy)

    def write(self, group: Any, *, wait: bool) -> None:
        """Starts the writes of the tiles of `group`, or waits for them."""
        half = group % 2

        def copy(i: Any, there: Any, *_: Any) -> None:
            dma = pltpu.make_async_copy(self.buffer.at[half, i], there, self.writes.at[half])
            dma.wait() if wait else dma.start()

        self._each(group, copy)

    def put(self, group: Any, images: Any) -> None:
        """Inserts new rows into the tiles of `group`; an image is one row or one tile of each head."""
        half = group % 2

        def one(i: Any, there: Any, row: Any, count: Any) -> None:
            word = _word(self.buffer.dtype)
            image = images[i].astype(word)
            image = image[:, None, :] if image.ndim == 2 else image
            tile = self.buffer[half, i].astype(word)
            at = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
            new = jnp.where((at >= row) & (at < row + count), image, tile)
            self.buffer[half, i] = new.astype(self.buffer.dtype)

        self._each(group, one)


def _kernel(fields: Any, images: Any, pool_in: Any, pool: Any, buffer: Any, reads: Any, writes: Any) -> None:
    del pool_in  # the same memory as `pool`
    group, num_groups = pl.program_id(0), pl.num_programs(0)
    tiles = _Tiles(fields, pool, buffer, reads, writes)

    @pl.when(group == 0)
    def _first() -> None:
        tiles.read(0, wait=False)

    @pl.when(group > 0)
    def _free() -> None:
        tiles.write(group - 1, wait=True)

    @pl.when(group + 1 < num_groups)
    def _ahead() -> None:
        tiles.read(group + 1, wait=False)

    tiles.read(group, wait=True)
    tiles.put(group, images)
    tiles.write(group, wait=False)

    @pl.when(group + 1 == num_groups)
    def _last() -> None:
        tiles.write(group, wait=True)


def _write(pool: jax.Array, tiles: jax.Array, images: jax.Array) -> jax.Array:
    """Returns ``pool[P, H, page, W]`` with `images` written into ``int32 tiles[n, fields]``."""
    _, heads, _, width = pool.shape
    tile = tile_rows(pool.dtype)
    group = max(1, min(MAX_GROUP, MAX_GROUP_BYTES // (heads * tile * width), tiles.shape[0]))
    num_groups = -(-tiles.shape[0] // group)
    missing = num_groups * group - tiles.shape[0]
    tiles = jnp.pad(tiles, ((0, missing), (0, 0)), constant_values=-1)
    images = jnp.pad(images, ((0, missing), *((0, 0),) * (images.ndim - 1)))
    zeros = (0,) * (images.ndim - 1)
    call = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_groups,),
            in_specs=[
                pl.BlockSpec((group, *images.shape[1:]), lambda i, *_: (i, *zeros)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((2, group, heads, tile, width), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=48 << 20, disable_bounds_checks=True
        ),
        name="write_tokens",
    )
    return call(tiles.reshape(-1), images, pool)
