"""Pages of one sequence of a batch: written, read and attended to under ``jax.vmap``.

Each function takes the pool of all sequences and one sequence's row of the page table. Under a ``vmap`` over sequences
the pool is not batched, neither as an operand nor as a result: the rows of the ``vmap`` have no page in common but the
null page, so that all of them write to one pool, in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from model_adapters.ops import spmd
from model_adapters.ops.attention_args import AttentionArgs, KVScales
from model_adapters.ops.cpu import pages
from model_adapters.ops.cpu.batching import merged, one_by_one, with_axis
from model_adapters.ops.cross_attention import cross_attention
from model_adapters.ops.decode_attention import decode_attention
from model_adapters.ops.kv_pool import has_copy_kernels, quantize, split, write_tokens_at


def write_token_rows(
    pool: jax.Array, table: jax.Array, rows: jax.Array, positions: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Returns the pool with ``tokens[T, H, W]`` in its dtype written; in place if it is donated.

    The others are as `write_tokens_at` has them.
    """
    if has_copy_kernels(spmd.mesh_in_use() is not None):
        return pages.write_tokens(pool, table, rows, positions, tokens)
    return write_tokens_at(pool, table, rows, positions, tokens, tokens[..., :0])


def _read(pool: jax.Array, table: jax.Array, lens: jax.Array, columns: slice, capacity: int | None = None) -> jax.Array:
    """Returns tokens ``[S, H, capacity, columns]``, zeros behind `lens` int32[S].

    `table` is int32[S, pages]; without a `capacity` the result has all that the pages have.
    """
    if has_copy_kernels(spmd.mesh_in_use() is not None):
        return pages.read_tokens(pool, table, lens, columns, capacity)
    num_rows, num_pages = table.shape
    _, heads, page, _ = pool.shape
    dense = jnp.swapaxes(pool[table], 1, 2).reshape(num_rows, heads, num_pages * page, -1)[:, :, :capacity, columns]
    is_stored = jnp.arange(dense.shape[2]) < lens[:, None]
    return jnp.where(is_stored[:, None, :, None], dense, 0)


@custom_vmap
def write_row(pool: jax.Array, table: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the pool with tokens of one sequence written.

    Args:
        pool: ``[P, H, page, W]``.
        table: ``int32[pages]``, the sequence's pages.
        positions: ``int32[T]``; a negative one, or one behind the pages, writes nothing.
        tokens: ``[T, H, W]`` in the pool's dtype.
    """
    return write_token_rows(pool, table[None], jnp.zeros_like(positions), positions, tokens)


@write_row.def_vmap
def _write_rows(axis_size: int, is_batched: list[bool], pool: jax.Array, *row: jax.Array) -> tuple[jax.Array, bool]:
    if is_batched[0]:
        return one_by_one(write_row, axis_size, is_batched, (pool, *row)), True
    table, positions, tokens = (with_axis(x, axis_size, own) for x, own in zip(row, is_batched[1:], strict=True))
    rows = jnp.repeat(jnp.arange(axis_size, dtype=jnp.int32), positions.shape[1])
    return write_token_rows(pool, table, rows, positions.reshape(-1), tokens.reshape(-1, *tokens.shape[2:])), False


def read_row(
    pool: jax.Array,
    table: jax.Array,
    length: jax.Array,
    columns: slice = slice(None),
    capacity: int | None = None,
) -> jax.Array:
    """Returns the first `length` int32[] tokens of one sequence, and zeros behind them.

    Another sequence's NaN there would not be removed by an attention weight of 0.

    Args:
        pool: ``[P, H, page, W]``.
        table: ``int32[pages]``, the sequence's pages.
        length: int32[].
        columns: Of the pool.
        capacity: Number of positions of the result; None: all that the pages have.

    Returns:
        ``[H, capacity, columns]``.
    """

    @custom_vmap
    def run(pool: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
        return _read(pool, table[None], length[None], columns, capacity)[0]

    @run.def_vmap
    def rule(axis_size: int, is_batched: list[bool], pool: jax.Array, *row: jax.Array) -> tuple[jax.Array, bool]:
        if is_batched[0]:
            return one_by_one(run, axis_size, is_batched, (pool, *row)), True
        tables, lens = (with_axis(x, axis_size, own) for x, own in zip(row, is_batched[1:], strict=True))
        return _read(pool, tables, lens, columns, capacity), True

    out: jax.Array = run(pool, table, length)
    return out


@custom_vmap
def attend_row(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    length: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Runs `decode_attention` for the new token of one sequence.

    Args:
        q: ``[1, Hq, D]``.
        k: ``[1, H, D]``.
        v: ``[1, H, Dv]``.
        pool: ``[P, H, page, W]``.
        table: ``int32[pages]``, the sequence's pages.
        length: int32[], with the new token.
        args: Scale and features of the scores.

    Returns:
        ``[1, Hq, Dv]``, and the pool.
    """
    return decode_attention(q, k, v, pool, table[None], length[None], jnp.zeros(1, jnp.int32), args)


@attend_row.def_vmap
def _attend_rows(axis_size: int, is_batched: list[Any], *operands: Any) -> Any:
    *given, pool, table, length, args = operands
    *tokens_batched, pool_batched, table_batched, length_batched, args_batched = is_batched
    args, are_merged = _of_rows(args, args_batched, axis_size)
    if pool_batched or not are_merged:
        return one_by_one(attend_row, axis_size, is_batched, operands), (True, True)
    q, k, v = (merged(x, axis_size, own) for x, own in zip(given, tokens_batched, strict=True))
    table, lens = with_axis(table, axis_size, table_batched), with_axis(length, axis_size, length_batched)
    out, pool = decode_attention(q, k, v, pool, table, lens, jnp.zeros_like(lens), args)
    return (out[:, None], pool), (True, False)


@custom_vmap
def attend_stored(
    q: jax.Array, keys: jax.Array, values: jax.Array, slot: jax.Array, length: jax.Array, args: AttentionArgs
) -> jax.Array:
    """Runs `cross_attention` for one query of one sequence.

    Args:
        q: ``[1, Hq, D]``.
        keys: ``[slots, H, room, D]``, of all sequences.
        values: ``[slots, H, room, Dv]``.
        slot: int32[], the sequence's.
        length: int32[], number of its keys.
        args: Scale and biases of the scores.

    Returns:
        ``[1, Hq, Dv]``.
    """
    return cross_attention(q, keys, values, slot[None, None], length[None], args)


@attend_stored.def_vmap
def _attend_stored_rows(axis_size: int, is_batched: list[Any], *operands: Any) -> Any:
    q, keys, values, slot, length, args = operands
    q_batched, keys_batched, values_batched, slot_batched, length_batched, args_batched = is_batched
    args, are_merged = _of_rows(args, args_batched, axis_size)
    if keys_batched or values_batched or not are_merged:
        return one_by_one(attend_stored, axis_size, is_batched, operands), True
    slots, lens = with_axis(slot, axis_size, slot_batched), with_axis(length, axis_size, length_batched)
    out = cross_attention(merged(q, axis_size, q_batched), keys, values, slots[:, None], lens, args)
    return out[:, None], True


def _of_rows(args: AttentionArgs, is_batched: AttentionArgs, axis_size: int) -> tuple[AttentionArgs, bool]:
    """Returns `args` with biases of all rows of a ``vmap``, and whether they share all else."""
    if args.position_biases is not None:
        biases = merged(args.position_biases, axis_size, bool(is_batched.position_biases))
        args = dataclasses.replace(args, position_biases=biases)
        is_batched = dataclasses.replace(is_batched, position_biases=None)
    return args, not any(jax.tree.leaves(is_batched))


def rounded(tokens: jax.Array, k_dim: int, scales: KVScales, dtype: Any) -> jax.Array:
    """Returns ``tokens[T, H, W]`` in 8 bits, of which the first `k_dim` columns are keys."""
    keys, values = tokens[..., :k_dim], tokens[..., k_dim:]
    return jnp.concatenate([quantize(keys, scales.k, dtype), quantize(values, scales.v, dtype)], axis=-1)


def widened(dense: jax.Array, k_dim: int, scales: KVScales, dtype: Any) -> jax.Array:
    """Returns ``dense[H, n, W]`` of 8 bits in `dtype`."""
    keys, values = split(dense, k_dim, slice(k_dim, dense.shape[-1]), scales)
    return jnp.concatenate([keys, values], axis=-1).astype(dtype)
