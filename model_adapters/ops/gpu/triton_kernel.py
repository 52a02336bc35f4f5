"""The attention kernel for GPUs through Pallas' Triton lowering.

Attention with a running softmax over blocks of keys (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv
2205.14135) on pages (Kwon et al., arXiv 2309.06180). One program computes an item (see `work_items.py`) for one kv
head: its rows are the item's queries times the query heads of the group, so that a key is read once for all of them
(query packing, as in arXiv 2511.11581). The keys of an item may be divided into splits, which are computed by separate
programs and combined afterwards (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model_adapters.ops.gpu.split_kv import LOG2_E, MASKED, NOTHING
from model_adapters.ops.gpu.work_items import FIELDS, SplitKVItem

Carry = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]  # largest score [R], sum of weights [R], weighted values


@dataclass(frozen=True)
class Piece:
    """Columns ``[begin, begin + size)`` of a row; columns from `end` on are padding."""

    begin: int
    size: int
    end: int


def pieces(dim: int) -> tuple[Piece, ...]:
    """Returns `dim` columns as one or two pieces of power-of-two size, at least 16.

    The second has at least 32: with 16 the compiler uses twice the registers.
    """
    first = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - first
    if rest <= 0:
        return (Piece(0, first, dim),)
    second = max(32, 1 << (rest - 1).bit_length())
    if second >= first:
        return (Piece(0, 2 * first, dim),)
    return Piece(0, first, dim), Piece(first, second, dim)


@dataclass(frozen=True)
class TritonFeatures:
    """Static features of the scores, and the dtype of the products' operands."""

    dtype: Any
    num_terms: int  # terms of that dtype whose sum is a row
    scale: float
    window: int | None
    softcap: float | None
    has_prefix: bool
    value_begin: int | None  # column of a key at which values begin; None: behind the keys


@dataclass(frozen=True)
class Tile:
    """Sizes of a program: `num_rows` rows, `num_keys` keys at a time; compiler options."""

    num_rows: int
    num_queries: int  # of an item; all their heads of one group are rows
    num_keys: int
    group: int
    num_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Inputs:
    """References to the arrays of a call; None for arrays that are not given."""

    items: Any  # int32[num_items, fields]
    table: Any  # int32[S * pages_per_seq]
    q: Any  # [T, Hq, D]
    pool: Any  # [P * H * page, W]
    sinks: Any = None  # [Hq]
    alibi: Any = None  # [Hq]
    k_scale: Any = None  # [H]
    v_scale: Any = None  # [H]
    until: Any = None  # int32[T]


@dataclass(frozen=True)
class QueryRows:
    """Token, head, position, validity and last visible position of each row."""

    token: jax.Array
    head: jax.Array
    position: jax.Array
    own: jax.Array
    last: jax.Array


def load_columns(ref: Any, index: tuple[jax.Array, ...], piece: Piece, offset: int, mask: jax.Array) -> jax.Array:
    """Loads ``[len(mask), piece.size]`` at ``ref[*index, offset + column]``, else zeros.

    Masked elements are not read: they may be NaN.
    """
    column = piece.begin + lax.broadcasted_iota(jnp.int32, (1, piece.size), 1)
    keep = mask[:, None]
    if piece.begin + piece.size > piece.end:
        keep = keep & (column < piece.end)
    keep = jnp.broadcast_to(keep, (mask.shape[0], piece.size))
    return plgpu.load(ref.at[*(i[:, None] for i in index), offset + column], mask=keep, other=jnp.zeros((), ref.dtype))


def terms(rows: jax.Array, dtype: Any, count: int) -> list[jax.Array]:
    """Returns `count` terms of `dtype` whose sum is ``rows[R, n]``, smallest last.

    Three terms of bfloat16 equal float32 bit for bit.
    """
    made = [rows.astype(dtype)]
    for _ in range(count - 1):
        rows = rows - made[-1].astype(jnp.float32)
        made.append(rows.astype(dtype))
    return made


def product(rows: list[jax.Array], matrix: jax.Array) -> jax.Array:
    """Returns the float32 product of a sum of ``rows[R, n]`` and ``matrix[n, m]``.

    Operands in float32 are not rounded. Terms of a 16-bit dtype use tensor cores, which a product in float32 does not.
    """
    precision = lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None
    made = [plgpu.dot(term, matrix, precision=precision) for term in reversed(rows)]
    return functools.reduce(jnp.add, made)


@dataclass(frozen=True)
class TritonProgram:
    """One program of the kernel: an item, a kv head and a split."""

    refs: Inputs
    features: TritonFeatures
    tile: Tile
    heads: int
    page: int
    pages_per_seq: int
    dim: int
    value_dim: int

    def rows(self, item: SplitKVItem, head: Any) -> QueryRows:
        """Returns the rows of `item` for kv head `head`, by query and then by query head."""
        row = lax.iota(jnp.int32, self.tile.num_rows)
        query = lax.div(row, jnp.int32(self.tile.group))
        token = item.begin + query
        own = (token < item.end) & (query < self.tile.num_queries)
        token = jnp.where(own, token, self.refs.q.shape[0])  # out of bounds if masked: no two rows write the same place
        position = last = token + item.shift
        if self.refs.until is not None:
            last = jnp.maximum(position, plgpu.load(self.refs.until.at[token], mask=own, other=-1))
        return QueryRows(token, head * self.tile.group + row - query * self.tile.group, position, own, last)

    def block_list(self, item: SplitKVItem) -> tuple[Any, Any, Any, Any]:
        """Lists the item's blocks: those of the prefix, then those from `low` to `high`, none twice.

        Returns begin and end of this split in the list, the number of prefix blocks, and the first block after them.
        """
        num_keys = jnp.int32(self.tile.num_keys)

        def blocks(length: Any) -> Any:
            return lax.div(jnp.maximum(length, 0) + (num_keys - 1), num_keys)

        num_prefix = blocks(jnp.minimum(item.prefix, item.high)) if self.features.has_prefix else jnp.int32(0)
        rest = jnp.maximum(lax.div(item.low, num_keys), num_prefix)
        total = num_prefix + jnp.maximum(blocks(item.high) - rest, 0)
        if self.tile.num_splits == 1:
            return jnp.int32(0), total, num_prefix, rest
        share = lax.div(total + (self.tile.num_splits - 1), jnp.int32(self.tile.num_splits))
        begin = pl.program_id(2) * share
        return begin, jnp.minimum(begin + share, total), num_prefix, rest

    def visible(self, item: SplitKVItem, key: jax.Array, rows: QueryRows) -> tuple[jax.Array, jax.Array]:
        """Returns which of ``key[n]`` any query sees, ``[n]``, and which each row sees, ``[R, n]``."""
        seen = key >= item.low
        if self.features.has_prefix:
            seen = seen | (key < item.prefix)
        seen = seen & (key < item.high)
        by_row = jnp.broadcast_to(seen[None, :], (self.tile.num_rows, self.tile.num_keys))
        if self.tile.num_queries == 1:  # the range of the item is that of its one query
            return seen, by_row
        causal = key[None, :] <= rows.last[:, None]
        if self.features.window is not None:
            causal = causal & (key[None, :] - rows.position[:, None] > -self.features.window)
        if self.features.has_prefix:
            causal = causal | (key < item.prefix)[None, :]
        return seen, by_row & causal & (rows.position >= 0)[:, None]

    def scores(self, products: jax.Array, head: Any, rows: QueryRows, key: jax.Array) -> jax.Array:
        """Returns scores ``float32[R, n]`` times log2(e), of products ``float32[R, n]``."""
        scale = self.features.scale
        factor = jnp.float32(scale if self.features.softcap is None else scale / self.features.softcap)
        if self.refs.k_scale is not None:
            factor = factor * self.refs.k_scale[head].astype(jnp.float32)
        if self.features.softcap is not None:
            return (self.features.softcap * LOG2_E) * jnp.tanh(products * factor)
        scores = products * (factor * LOG2_E)
        if self.refs.alibi is not None:
            slope = plgpu.load(self.refs.alibi.at[rows.head], mask=rows.own, other=0).astype(jnp.float32) * LOG2_E
            scores = scores + slope[:, None] * (key[None, :] - rows.position[:, None]).astype(jnp.float32)
        return scores

    def run(self, item: SplitKVItem, head: Any, rows: QueryRows) -> Carry:
        """Returns largest scores, sums of weights and weighted values of this split."""
        refs, tile, dtype, count = self.refs, self.tile, self.features.dtype, self.features.num_terms
        key_pieces, value_pieces = pieces(self.dim), pieces(self.value_dim)
        value_begin = self.dim if self.features.value_begin is None else self.features.value_begin
        loaded = [load_columns(refs.q, (rows.token, rows.head), piece, 0, rows.own) for piece in key_pieces]
        queries = [terms(part, dtype, count) for part in loaded]
        begin, end, num_prefix, rest = self.block_list(item)
        last_page = refs.pool.shape[0] // (self.heads * self.page) - 1

        # The loop over the blocks of keys of the split, those of a prefix first. The carry is the running softmax: the
        # largest score so far of each row, times log2(e); the sum of the weights 2 ** (score - largest); the values
        # with these weights, by piece of their columns. Scores that are hidden are `MASKED`, below `NOTHING`, with
        # which the largest score begins: their weight is zero in a row that has seen nothing, too.
        def step(index: Any, carry: Carry) -> Carry:
            top, total, sums = carry
            block = jnp.where(index < num_prefix, index, index - num_prefix + rest)
            key = block * tile.num_keys + lax.iota(jnp.int32, tile.num_keys)
            seen, visible = self.visible(item, key, rows)
            column = lax.div(key, jnp.int32(self.page))
            page = plgpu.load(refs.table.at[item.seq * self.pages_per_seq + column], mask=seen, other=0)
            page = jnp.clip(page, 0, last_page)
            row = (page * self.heads + head) * self.page + (key - column * self.page)
            products = jnp.zeros((tile.num_rows, tile.num_keys), jnp.float32)
            for query, piece in zip(queries, key_pieces, strict=True):
                keys = load_columns(refs.pool, (row,), piece, 0, seen).astype(dtype)
                products = products + product(query, keys.T)
            scores = jnp.where(visible, self.scores(products, head, rows, key), MASKED)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - new_top[:, None])
            shrink = jnp.exp2(top - new_top)
            total = shrink * total + jnp.sum(weights, axis=1)
            weighing, new_sums = terms(weights, dtype, count), []
            for piece, old in zip(value_pieces, sums, strict=True):
                values = load_columns(refs.pool, (row,), piece, value_begin, seen).astype(dtype)
                new_sums.append(shrink[:, None] * old + product(weighing, values))
            return new_top, total, tuple(new_sums)

        sums = tuple(jnp.zeros((tile.num_rows, piece.size), jnp.float32) for piece in value_pieces)
        top = jnp.full((tile.num_rows,), NOTHING, jnp.float32)
        return lax.fori_loop(begin, end, step, (top, jnp.zeros((tile.num_rows,), jnp.float32), sums))

    def store(self, ref: Any, index: tuple[Any, ...], rows: QueryRows, parts: list[jax.Array]) -> None:
        """Writes rows of values ``float32[R, piece]`` at ``ref[*index, token, head]``."""
        for piece, part in zip(pieces(self.value_dim), parts, strict=True):
            column = piece.begin + lax.broadcasted_iota(jnp.int32, (1, piece.size), 1)
            keep = jnp.broadcast_to(rows.own[:, None] & (column < self.value_dim), part.shape)
            at = ref.at[*index, rows.token[:, None], rows.head[:, None], column]
            plgpu.store(at, part.astype(ref.dtype), mask=keep)


def kernel(program: TritonProgram, out: Any, logs: Any) -> None:
    """Computes the attention of one item and kv head.

    Without splits it writes the output ``[T, Hq, Dv]``. Else `out` is ``float32[splits, T, Hq, Dv]`` and gets the
    attention over the split, and `logs`, ``float32[splits, T, Hq]``, the logarithm to base 2 of its sum of weights.
    """
    index, head = pl.program_id(0), pl.program_id(1)
    item = SplitKVItem(*(program.refs.items[index, i] for i in range(len(FIELDS))))
    rows = program.rows(item, head)
    top, total, sums = program.run(item, head, rows)
    if logs is None and program.refs.sinks is not None:
        sink = plgpu.load(program.refs.sinks.at[rows.head], mask=rows.own, other=0).astype(jnp.float32) * LOG2_E
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp2(top - new_top)
        total = shrink * total + jnp.exp2(sink - new_top)
        sums = tuple(shrink[:, None] * part for part in sums)
    is_seen = total > 0
    factor = jnp.where(is_seen, 1.0 / jnp.where(is_seen, total, 1.0), 0.0)
    if program.refs.v_scale is not None:
        factor = factor * program.refs.v_scale[head].astype(jnp.float32)
    parts = [part * factor[:, None] for part in sums]
    if logs is None:
        program.store(out, (), rows, parts)
        return
    split = pl.program_id(2)
    program.store(out, (split,), rows, parts)
    log = jnp.where(is_seen, top + jnp.log(jnp.where(is_seen, total, 1.0)) * LOG2_E, MASKED)
    plgpu.store(logs.at[split, rows.token, rows.head], log, mask=rows.own)


def combine_kernel(outs: Any, logs: Any, sinks: Any, out: Any, dims: tuple[Piece, ...]) -> None:
    """Combines the splits of one token and head that `kernel` has written; `sinks` may be None."""
    token, head = pl.program_id(0), pl.program_id(1)
    split = lax.iota(jnp.int32, outs.shape[0])
    log = plgpu.load(logs.at[split, token, head])
    top = jnp.max(log)
    sink = None if sinks is None else sinks[head].astype(jnp.float32) * LOG2_E
    if sink is not None:
        top = jnp.maximum(top, sink)
    weights = jnp.where(log > NOTHING, jnp.exp2(log - top), 0.0)
    total = jnp.sum(weights)
    if sink is not None:
        total = total + jnp.exp2(sink - top)
    weights = weights / jnp.where(total == 0, 1.0, total)
    for piece in dims:
        column = piece.begin + lax.broadcasted_iota(jnp.int32, (1, piece.size), 1)
        keep = jnp.broadcast_to(column < piece.end, (outs.shape[0], piece.size))
        parts = plgpu.load(outs.at[split[:, None], token, head, column], mask=keep, other=0.0)
        made = jnp.sum(parts * weights[:, None], axis=0)
        plgpu.store(out.at[token, head, column[0]], made.astype(out.dtype), mask=column[0] < piece.end)
