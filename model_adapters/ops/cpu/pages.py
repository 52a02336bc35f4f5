"""The C++ copies between pages of a pool and dense arrays, as JAX functions."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from model_adapters.ops.cpu.ffi import ffi_call


def write_pages(pool: jax.Array, pages: jax.Array, values: jax.Array, after: Sequence[jax.Array] = ()) -> jax.Array:
    """Returns the pool ``[P, ...]`` with `values` as its pages int32[n]; in place if donated.

    Runs after what computes `after`: XLA copies a pool unless it can prove that all reads come before the write.
    """
    call = ffi_call("tas_write_pages", jax.ShapeDtypeStruct(pool.shape, pool.dtype), input_output_aliases={0: 0})
    out: jax.Array = call(pool, pages, values, *after)
    return out


def write_tokens(
    pool: jax.Array,
    table: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    tokens: jax.Array,
    after: Sequence[jax.Array] = (),
) -> jax.Array:
    """Returns the pool with tokens written, with zeros behind their width; in place if donated.

    Args:
        pool: ``[P, H, page, W]``.
        table: ``int32[S, pages_per_seq]``.
        rows: ``int32[T]``, the row of `table` that each token belongs to.
        positions: ``int32[T]``; a token without a place in its row or in the pool is not written.
        tokens: ``[T, H, w]`` in the pool's dtype, w at most W.
        after: As for :func:`write_pages`.
    """
    call = ffi_call("tas_write_tokens", jax.ShapeDtypeStruct(pool.shape, pool.dtype), input_output_aliases={0: 0})
    out: jax.Array = call(pool, table, rows, positions, tokens, *after)
    return out


def read_tokens(
    pool: jax.Array, table: jax.Array, lens: jax.Array, columns: slice, capacity: int | None = None
) -> jax.Array:
    """Returns columns of the first `lens` int32[S] positions of rows of pages.

    Args:
        pool: ``[P, H, page, W]``.
        table: ``int32[S, pages]``.
        lens: ``int32[S]``.
        columns: Of the pool, with a step of one.
        capacity: Number of positions of the result; None: all that the pages have.

    Returns:
        ``[S, H, capacity, columns]``, zeros behind `lens`.
    """
    _, heads, page, width = pool.shape
    first, end, _ = columns.indices(width)
    capacity = table.shape[1] * page if capacity is None else capacity
    result = jax.ShapeDtypeStruct((table.shape[0], heads, capacity, end - first), pool.dtype)
    out: jax.Array = ffi_call("tas_read_tokens", result)(pool, table, lens, first_column=np.int64(first))
    return out
