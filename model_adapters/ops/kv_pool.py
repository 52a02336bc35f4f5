"""The pool of keys and values: its layout, its forms in 8 bits, the write of new tokens.

A pool is ``[P, H, page, W]`` with ``W >= D + Dv``: keys at ``[0:D]``, values at ``[D:D+Dv]``, then zeros, so that W can
be a multiple of 128 where a platform needs that. Values that are columns of keys (`AttentionArgs.value_begin`) are not
stored again: then ``W >= D``. A pool in 8 bits holds ``x / scale``, rounded and clipped, with one
scale per kv head for keys and one for values: int8 within -127 .. 127 (symmetric quantization; -128 is unused so that
the range is symmetric), float8_e4m3fn within -448 .. 448, its largest number.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, spmd
from model_adapters.ops.attention_args import AttentionArgs, KVScales
from model_adapters.ops.cpu import ffi
from model_adapters.ops.cpu import pages as page_kernels
from model_adapters.ops.cpu.batching import divided, merged
from model_adapters.ops.searchsorted import num_at_most

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest magnitude of a stored number, by the dtype of a pool in 8 bits; a pool of these has scales, no other has."""


def expect(op: str, what: str, expected: Any, got: Any) -> None:
    """Raises InvalidArgumentError if `got` is not `expected`."""
    if expected != got:
        raise InvalidArgumentError(f"{op}: expected {what} {expected}, got {got}")


def check_int_array(op: str, name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `array` as int32.

    Raises:
        InvalidArgumentError: a dtype that is not an integer one, or another shape than `shape`.
    """
    expect(op, f"{name} of shape", shape, array.shape)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise InvalidArgumentError(f"{op}: expected {name} of an integer dtype, got {array.dtype}")
    return jnp.asarray(array, jnp.int32)


def check_arrays(
    op: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    args: AttentionArgs,
) -> None:
    """Raises InvalidArgumentError if queries, new tokens, pool and scales do not fit."""
    kv_scales = args.kv_scales
    for name, array, rank in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("pool", pool, 4), ("page_table", page_table, 2)):
        expect(op, f"{name} of rank", rank, array.ndim)
    num_tokens, query_heads, dim = q.shape
    heads, value_dim = k.shape[1], v.shape[2]
    if heads == 0 or query_heads % heads:
        raise InvalidArgumentError(f"{op}: expected query heads a multiple of kv heads, got {query_heads} and {heads}")
    expect(op, "k of shape", (num_tokens, heads, dim), k.shape)
    expect(op, "v of shape", (num_tokens, heads, value_dim), v.shape)
    begin = args.value_begin
    if begin is not None and not 0 <= begin <= dim - value_dim:
        raise InvalidArgumentError(
            f"{op}: expected value_begin within 0 .. D - Dv = {dim - value_dim}, so that keys have all columns of "
            f"values, got {begin}"
        )
    needed, columns = (dim + value_dim, "D + Dv") if begin is None else (dim, "D")
    if pool.shape[1] != heads or pool.shape[3] < needed:
        raise InvalidArgumentError(
            f"{op}: expected a pool with [kv heads, page, {columns} or more] = "
            f"{(heads, pool.shape[2], needed)}, got {pool.shape[1:]}"
        )
    if 0 in (pool.shape[0], pool.shape[2], page_table.shape[1]):
        raise InvalidArgumentError(
            f"{op}: expected at least one page of at least one position, got pool {pool.shape}, "
            f"page_table {page_table.shape}"
        )
    if (str(pool.dtype) in LARGEST) != (kv_scales is not None):
        raise InvalidArgumentError(
            f"{op}: expected kv_scales with a pool of {' or '.join(LARGEST)} and with no other, got a pool of "
            f"{pool.dtype} {'without' if kv_scales is None else 'with'} kv_scales"
        )
    if kv_scales is not None:
        for name, scale in (("k", kv_scales.k), ("v", kv_scales.v)):
            expect(op, f"kv_scales.{name} of shape", (heads,), scale.shape)
    if str(pool.dtype) not in LARGEST and not jnp.issubdtype(pool.dtype, jnp.floating):
        raise InvalidArgumentError(f"{op}: expected a pool of a float dtype or int8, got {pool.dtype}")


def checked_args(op: str, args: AttentionArgs, query_heads: int, num_seqs: int, num_tokens: int) -> AttentionArgs:
    """Returns `args` with arrays of integers as int32, and the scales of values as stored.

    Raises:
        InvalidArgumentError: an array of another shape, a window or soft cap that is not positive, or a soft cap
            together with ALiBi.
    """
    for name, array in (("sinks", args.sinks), ("alibi_slopes", args.alibi_slopes)):
        if array is not None:
            expect(op, f"{name} of shape", (query_heads,), array.shape)
    if args.window is not None and args.window < 1:
        raise InvalidArgumentError(f"{op}: expected a window of at least 1 or None, got {args.window}")
    if args.softcap is not None and args.softcap <= 0:
        raise InvalidArgumentError(f"{op}: expected a positive softcap or None, got {args.softcap}")
    if args.softcap is not None and args.alibi_slopes is not None:
        raise InvalidArgumentError(
            f"{op}: expected softcap or alibi_slopes, got both; the order of the two is not defined, so leave one out"
        )
    if args.distance_biases is not None:
        weights, profiles = args.distance_biases.weights, args.distance_biases.profiles
        expect(op, "weights of distance_biases of shape", (num_tokens, query_heads, profiles.shape[0]), weights.shape)
        if args.softcap is not None:
            raise InvalidArgumentError(
                f"{op}: expected softcap or distance_biases, got both; the order of the two is not defined, so leave "
                "one out"
            )
    if args.position_biases is not None:
        got = args.position_biases.shape
        expect(op, "position_biases of shape", (num_tokens, query_heads, *got[2:3]), got)
        if args.softcap is not None:
            raise InvalidArgumentError(
                f"{op}: expected softcap or position_biases, got both; the order of the two is not defined, so leave "
                "one out"
            )
    if args.token_sinks is not None:
        expect(op, "token_sinks of shape", (num_tokens, query_heads), args.token_sinks.shape)
        if args.sinks is not None:
            raise InvalidArgumentError(f"{op}: expected sinks or token_sinks, got both; leave one out")
    if args.value_begin is not None and args.kv_scales is not None:
        args = dataclasses.replace(args, kv_scales=KVScales(args.kv_scales.k, args.kv_scales.k))
    if args.prefix_lens is not None:
        prefix_lens = check_int_array(op, "prefix_lens", args.prefix_lens, (num_seqs,))
        args = dataclasses.replace(args, prefix_lens=prefix_lens)
    if args.sees_until is not None:
        args = dataclasses.replace(args, sees_until=check_int_array(op, "sees_until", args.sees_until, (num_tokens,)))
    return args


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``x[..., H, D]`` by ``float32 scale[H]``, in int8 or float8_e4m3fn.

    It is clipped to the largest number.

    Ties are rounded to even. NaN becomes 0.
    """
    return rounded_steps(x.astype(jnp.float32) / scale.astype(jnp.float32)[:, None], dtype)


def rounded_steps(steps: jax.Array, dtype: Any) -> jax.Array:
    """Returns float32 multiples of a scale in int8 or fp8, rounded as by `quantize`."""
    steps = jnp.where(jnp.isnan(steps), 0.0, steps)
    if dtype == jnp.int8:
        steps = jnp.round(steps)
    largest = LARGEST[str(jnp.dtype(dtype))]
    return jnp.clip(steps, -largest, largest).astype(dtype)


def split(rows: jax.Array, dim: int, columns: slice, kv_scales: KVScales | None) -> tuple[jax.Array, jax.Array]:
    """Returns keys ``[..., H, n, D]`` and values ``[..., H, n, Dv]`` in float32.

    `rows` of the pool are ``[..., H, n, W]``, `columns` those of values.
    """
    keys = rows[..., :dim].astype(jnp.float32)
    values = rows[..., columns].astype(jnp.float32)
    if kv_scales is not None:
        keys = keys * kv_scales.k.astype(jnp.float32)[:, None, None]
        values = values * kv_scales.v.astype(jnp.float32)[:, None, None]
    return keys, values


def has_copy_kernels(is_on_mesh: bool) -> bool:
    """Returns whether C++ kernels copy between pools and dense arrays.

    `is_on_mesh`: pools may be divided among devices.
    """
    return registry.platform() == "cpu" and not is_on_mesh and ffi.missing() is None


def write_pages(pool: jax.Array, pages: jax.Array, values: jax.Array, *, is_on_mesh: bool) -> jax.Array:
    """Returns the pool with pages replaced; in place if the pool is donated and on one device.

    Args:
        pool: ``[P, H, page, W]``, or rows of another shape.
        pages: ``int32[n]``; a page may occur twice with the same values.
        values: ``[n, H, page, W]``, in the pool's dtype.
        is_on_mesh: Whether the pool may be divided among devices.
    """
    if has_copy_kernels(is_on_mesh):
        as_pages = (x if x.ndim == 4 else x.reshape(x.shape[0], 1, 1, -1) for x in (pool, values))
        return page_kernels.write_pages(next(as_pages), pages, next(as_pages)).reshape(pool.shape)
    dtype = pool.dtype
    pool, values = (_as_bits(x) for x in (pool, values))
    pool = pool.at[pages].set(values)
    return pool if pool.dtype == dtype else jax.lax.bitcast_convert_type(pool, dtype)


def take_rows(pool: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns ``[n, m, W]``, the rows int32[n, m] of ``pool[N, W]``.

    Of rows outside of the pool it returns the nearest.

    XLA's CPU backend would convert all of a pool of narrow floats; there a C++ kernel copies the rows.
    """
    if has_copy_kernels(spmd.mesh_in_use() is not None):
        lens = jnp.full(rows.shape[:1], rows.shape[1], jnp.int32)
        return page_kernels.read_tokens(pool[:, None, None], jnp.clip(rows, 0, len(pool) - 1), lens, slice(None))[:, 0]
    return jnp.take(pool, rows, axis=0, mode="clip")


@custom_vmap
def write_at(pool: jax.Array, new: jax.Array, offset: jax.Array) -> jax.Array:
    """Returns a pool with new tokens from position `offset` int32[] on.

    The pool is ``[B, H, capacity, W]``, the tokens are ``[B, H, n, W]``.

    Offsets that differ by row of a ``vmap`` would make XLA's update a scatter, which on a CPU converts all of a pool of
    narrow floats; there a C++ kernel writes in place.
    """
    return jax.lax.dynamic_update_slice_in_dim(pool, new.astype(pool.dtype), offset, axis=2)


@write_at.def_vmap
def _write_at_rows(
    axis_size: int, is_batched: list[bool], pool: jax.Array, new: jax.Array, offset: jax.Array
) -> tuple[jax.Array, bool]:
    if not is_batched[2] or not has_copy_kernels(spmd.mesh_in_use() is not None):
        axes = [0 if batched else None for batched in is_batched]
        plain = partial(jax.lax.dynamic_update_slice_in_dim, axis=2)
        return jax.vmap(plain, axes)(pool, new.astype(pool.dtype), offset), True
    pools, news = merged(pool, axis_size, is_batched[0]), merged(new, axis_size, is_batched[1])
    num_rows, heads, num_new, width = news.shape
    rows = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), num_new)
    first = jnp.repeat(offset.astype(jnp.int32), num_rows // axis_size)
    positions = (first[:, None] + jnp.arange(num_new, dtype=jnp.int32)).reshape(-1)
    tokens = jnp.swapaxes(news, 1, 2).reshape(-1, heads, width).astype(pools.dtype)
    table = jnp.arange(num_rows, dtype=jnp.int32)[:, None]  # a pool of one page, as long as the capacity, for each row
    return divided(page_kernels.write_tokens(pools, table, rows, positions, tokens), axis_size), True


def _as_bits(x: jax.Array) -> jax.Array:
    """Returns narrow floats as integers where XLA would convert all of a pool for a scatter.

    XLA's CPU backend scatters narrow floats in float32, converting all of the pool and back. As integers it costs one
    copy of the pool instead of three passes; the C++ kernels copy nothing.
    """
    dtype = x.dtype
    if registry.platform() != "cpu" or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.uint16 if dtype.itemsize == 2 else jnp.uint8)


def token_positions(num_tokens: int, kv_lens: jax.Array, cu_q_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns each token's sequence and position, ``int32[num_tokens]`` each.

    Padding has position -1. `kv_lens` is ``int32[S]``, `cu_q_lens` ``int32[S + 1]``, as in `paged_attention`.
    """
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    seqs = num_at_most(cu_q_lens[1:], tokens)  # S for padding
    known = jnp.minimum(seqs, kv_lens.shape[0] - 1)
    return known, jnp.where(seqs == known, kv_lens[known] - cu_q_lens[known + 1] + tokens, -1)


def write_tokens_at(
    pool: jax.Array,
    page_table: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_scales: KVScales | None = None,
) -> jax.Array:
    """Returns the pool with new keys and values written; in place if the pool is donated.

    Args:
        pool: ``[P, H, page, W]``.
        page_table: ``int32[S, pages_per_seq]``.
        rows: ``int32[T]``, the row of `page_table` that each token belongs to.
        positions: ``int32[T]``; a negative one, one beyond the row's pages, or one on a page outside the pool writes
            nothing.
        k: ``[T, H, D]``.
        v: ``[T, H, Dv]``.
        kv_scales: Scales of a pool in 8 bits, ``float32[H]`` each.
    """
    num_pages, heads, page, width = pool.shape
    column = positions // page
    known = jnp.clip(column, 0, page_table.shape[1] - 1)
    pages = page_table[jnp.clip(rows, 0, page_table.shape[0] - 1), known]
    writable = (positions >= 0) & (column < page_table.shape[1]) & (pages >= 0) & (pages < num_pages)
    flat = (pages[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)) * page + (positions % page)[:, None]
    # Others are out of bounds, hence dropped, each at an index of its own.
    unused = num_pages * heads * page + jnp.arange(flat.size, dtype=jnp.int32).reshape(flat.shape)
    flat = jnp.where(writable[:, None], flat, unused)
    if kv_scales is not None:
        k, v = quantize(k, kv_scales.k, pool.dtype), quantize(v, kv_scales.v, pool.dtype)
    token = jnp.concatenate([k, v], axis=-1).astype(pool.dtype)
    token = jnp.pad(token, ((0, 0), (0, 0), (0, width - token.shape[2])))
    dtype = pool.dtype
    pool, token = _as_bits(pool), _as_bits(token)
    # One flat row per token and head: XLA keeps this scatter in place, unlike one over (page, :, slot).
    # Of indices that may be equal, XLA's GPU backend writes each 16 bits by an atomic compare and swap. Only dummy rows
    # share a slot, on the null page, where any of their values will do.
    is_unique = registry.platform() == "gpu"
    pool = pool.reshape(-1, width).at[flat].set(token, mode="drop", unique_indices=is_unique).reshape(pool.shape)
    return pool if pool.dtype == dtype else jax.lax.bitcast_convert_type(pool, dtype)


def softmax_times_values(
    scores: jax.Array, visible: jax.Array, values: jax.Array, seen: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    """Returns the softmax over visible scores times the values, ``float32[..., R, Dv]``.

    Queries that see nothing give zeros.

    Args:
        scores: ``float32[..., R, n]``.
        visible: Booleans that broadcast to `scores`.
        values: ``float32[..., n, Dv]``.
        seen: Booleans that broadcast to `values`: False where no query sees the value, which may then be NaN.
        sinks: float32 logits that broadcast to ``[..., R, 1]`` and carry no value, or None.
    """
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    top = jnp.where(jnp.isneginf(top), 0.0, top)  # nothing visible: keeps exp(-inf - -inf) out
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    weights = weights / jnp.where(total == 0, 1.0, total)
    values = jnp.where(seen, values, 0.0)  # 0 * NaN would be NaN: unused slots may hold it
    return jnp.einsum("...rs,...sd->...rd", weights, values, precision=jax.lax.Precision.HIGHEST)
