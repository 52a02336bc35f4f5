"""The C++ kernels of attention as JAX functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.ops.cpu import ffi
from model_adapters.ops.cpu.batching import divided, merged, one_by_one
from model_adapters.ops.cpu.ffi import ffi_call, or_empty

POOL_DTYPES = (*ffi.DTYPES, jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))


def attention_unsupported_reason(
    q: jax.Array, k: jax.Array, v: jax.Array, pool: jax.Array, args: AttentionArgs
) -> str | None:
    """Returns why the attention kernels cannot take the arrays, or None."""
    if args.position_biases is not None and args.distance_biases is not None:
        return "the kernel has position_biases or distance_biases, not both"
    for name, array, dtypes in (
        ("q", q, ffi.DTYPES),
        ("k", k, ffi.DTYPES),
        ("v", v, ffi.DTYPES),
        ("pool", pool, POOL_DTYPES),
    ):
        if array.dtype not in dtypes:
            return f"{name} is {array.dtype}; the kernel has {', '.join(str(dtype) for dtype in dtypes)}"
    return ffi.missing()


DECODE_ARGS = frozenset(
    ("window", "softcap", "sinks", "alibi_slopes", "kv_scales", "value_begin", "position_biases", "distance_biases")
) | {"token_sinks"}
PAGED_ARGS = DECODE_ARGS | {"prefix_lens", "sees_until"}
"""Fields of `AttentionArgs` that the kernels take."""
MARGIN = 16
"""Zeros on each side of biases by distance, which the kernels' vectors read (`kBiasMargin`)."""
BLOCK = 64
"""Positions that the kernels take at once."""


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Runs the op as one fused kernel, which updates a donated pool in place."""
    floats = [or_empty(array) for array in (_sinks(args), args.alibi_slopes, args.k_scale, args.v_scale)]
    ints = [array.astype(jnp.int32) for array in (page_table, lens, starts)]
    biases = _biases(args, page_table.shape[1] * pool.shape[2])

    @custom_vmap
    def run(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, pool, *others = arrays
        return _attend("tas_decode_attention", q, k, v, pool, others, args)

    @run.def_vmap
    def rule(axis_size: int, is_batched: list[bool], *arrays: jax.Array) -> Any:
        """Makes one pool of those of all rows of the ``vmap``, and numbers its pages on."""
        if any(is_batched[7:-1]):
            return one_by_one(run, axis_size, is_batched, arrays), (True, True)
        *others, biases = arrays[7:]
        if biases.size:
            biases = merged(biases, axis_size, is_batched[-1])
        q, k, v, pool, table, lens, starts = map(merged, arrays[:7], [axis_size] * 7, is_batched)
        num_pages = len(pool) // axis_size
        first = jnp.repeat(jnp.arange(axis_size, dtype=jnp.int32) * num_pages, len(table) // axis_size)[:, None]
        table = jnp.where((table >= 0) & (table < num_pages), first + table, -1)
        out, pool = run(q, k, v, pool, table, lens, starts, *others, biases)
        return (divided(out, axis_size), divided(pool, axis_size)), (True, True)

    out: tuple[jax.Array, jax.Array] = run(q, k, v, pool, *ints, *floats, biases)
    return out


def cross_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, page_table: jax.Array, lens: jax.Array, args: AttentionArgs
) -> jax.Array:
    """Runs the op as one kernel, which reads no more than `lens` positions."""
    result = jax.ShapeDtypeStruct((*q.shape[:2], values.shape[3]), q.dtype)
    biases = _in_blocks(args.position_biases, page_table.shape[1] * keys.shape[2])
    options = {"scale": np.float32(args.scale), "softcap": np.float32(args.softcap or 0.0)}
    out: jax.Array = ffi_call("tas_cross_attention", result)(q, keys, values, page_table, lens, biases, **options)
    return out


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, args: AttentionArgs, *, causal: bool
) -> jax.Array:
    """Runs the op as one kernel, whose scores stay in the caches.

    With `causal` there are as many queries as keys.
    """
    biases = jnp.zeros((0,) * 4, jnp.float32)
    if mask is not None:
        added = jnp.where(mask, 0.0, -jnp.inf) if mask.dtype == jnp.bool_ else mask
        added = jnp.broadcast_to(added.astype(jnp.float32), (*mask.shape[:3], k.shape[2]))
        biases = jnp.pad(added, ((0, 0), (0, 0), (0, 0), (0, -k.shape[2] % BLOCK)))
    options = {"scale": np.float32(args.scale), "softcap": np.float32(args.softcap or 0.0), "causal": causal}

    @custom_vmap
    def run(*arrays: jax.Array) -> jax.Array:
        q, k, v, biases, sinks = arrays
        result = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
        out: jax.Array = ffi_call("tas_dense_attention", result)(q, k, v, biases, sinks, **options)
        return out

    @run.def_vmap
    def rule(axis_size: int, is_batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        """Makes one batch of those of all rows of the ``vmap``."""
        if is_batched[4]:
            return one_by_one(run, axis_size, is_batched, arrays), True
        *of_rows, biases, sinks = arrays
        q, k, v = map(merged, of_rows, [axis_size] * 3, is_batched)
        if biases.size and (is_batched[3] or biases.shape[0] > 1):  # else all have one
            each = (axis_size, len(q) // axis_size, *biases.shape[-3:])
            biases = jnp.broadcast_to(biases, each).reshape(-1, *each[2:])
        return divided(run(q, k, v, biases, sinks), axis_size), True

    out: jax.Array = run(jnp.swapaxes(q, 1, 2), k, v, biases, or_empty(args.sinks))
    return jnp.swapaxes(out, 1, 2)


def varlen_attention(q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array, args: AttentionArgs) -> jax.Array:
    """Runs the op as one kernel, which reads the keys of each text alone.

    What a token gets is bit-equal whichever texts stand beside its own.
    """
    until = jnp.zeros((0,), jnp.int32) if args.sees_until is None else args.sees_until
    result = jax.ShapeDtypeStruct((*q.shape[:2], v.shape[2]), q.dtype)
    options = {
        "scale": np.float32(args.scale),
        "softcap": np.float32(args.softcap or 0.0),
        "window": np.int64(args.window or 0),
    }
    out: jax.Array = ffi_call("tas_varlen_attention", result)(
        q, k, v, cu_seqlens, until, or_empty(args.sinks), **options
    )
    return out


def _in_blocks(biases: jax.Array | None, capacity: int) -> jax.Array:
    """Returns ``biases[T, Hq, S]`` up to the end of the last block of `capacity`; empty if None."""
    if biases is None:
        return jnp.zeros((0,), jnp.float32)
    size = -(-capacity // BLOCK) * BLOCK
    biases = biases[..., :size].astype(jnp.float32)
    return jnp.pad(biases, ((0, 0), (0, 0), (0, size - biases.shape[2])))


def _biases(args: AttentionArgs, capacity: int) -> jax.Array:
    """Returns biases of each token and query head, by position or distance; or none."""
    if (given := args.distance_biases) is None:
        return _in_blocks(args.position_biases, capacity)
    # From the furthest key to the query's own, as keys follow each other.
    weights, profiles = given.weights.astype(jnp.float32), given.profiles[:, ::-1].astype(jnp.float32)
    by_distance = jnp.einsum("thr,re->the", weights, profiles, precision=jax.lax.Precision.HIGHEST)
    return jnp.pad(by_distance, ((0, 0), (0, 0), (MARGIN, MARGIN)))


def _sinks(args: AttentionArgs) -> jax.Array | None:
    """Returns the sinks of all tokens, or those of each."""
    return args.sinks if args.token_sinks is None else args.token_sinks


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Runs the op as one fused kernel, which updates a donated pool in place.

    A token's result is bit-equal for any batch, any chunks of its prompt and any number of threads, and bit-equal to
    that of :func:`decode_attention`.
    """
    spans = [jnp.zeros((0,), jnp.int32) if each is None else each for each in (args.prefix_lens, args.sees_until)]
    floats = [or_empty(array) for array in (_sinks(args), args.alibi_slopes, args.k_scale, args.v_scale)]
    ints = [array.astype(jnp.int32) for array in (page_table, kv_lens, cu_q_lens, *spans)]
    biases = _biases(args, page_table.shape[1] * pool.shape[2])
    return _attend("tas_paged_attention", q, k, v, pool, [*ints, *floats, biases], args)


def _attend(
    target: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    arrays: list[jax.Array],
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Calls an attention target; absent arrays are passed as arrays without elements."""
    results = (
        jax.ShapeDtypeStruct((*q.shape[:2], v.shape[2]), q.dtype),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
    )
    call = ffi_call(target, results, input_output_aliases={3: 1})
    options = {
        "scale": np.float32(args.scale),
        "softcap": np.float32(args.softcap or 0.0),
        "window": np.int64(args.window or 0),
        "value_begin": np.int64(-1 if args.value_begin is None else args.value_begin),
        "reach": np.int64(0 if args.distance_biases is None else args.distance_biases.profiles.shape[1]),
    }
    out, pool = call(q, k, v, pool, *arrays, **options)
    return out, pool
