"""The C++ kernels of recurrent layers as JAX functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops.cpu import ffi
from model_adapters.ops.segments import Segments

Results = tuple[jax.Array, jax.Array]


def unsupported_reason(*arrays: jax.Array) -> str | None:
    """Returns why the kernels cannot take these arrays, of which the first has tokens, or None."""
    if not arrays[0].shape[0]:
        return "no tokens"
    for array in arrays:
        if array.dtype not in ffi.DTYPES:
            return f"an operand is {array.dtype}, the kernel has bfloat16, float16 and float32"
    return ffi.missing()


def _in_one_dtype(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays in their dtype, in float32 if they have several."""
    dtype = arrays[0].dtype if len({array.dtype for array in arrays}) == 1 else jnp.float32
    return [array.astype(dtype) for array in arrays]


def _updated(
    target: str, out: jax.Array, operands: list[jax.Array], pool: jax.Array, segments: Segments, **attributes: Any
) -> Results:
    """Calls a kernel with results like `out` and `pool`, which is updated in place if donated."""
    results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (out, pool)]
    table = [segments.cu, segments.read, segments.write, segments.first]
    made: Results = ffi.ffi_call(target, results, input_output_aliases={0: 1})(
        pool,
        *(each.astype(jnp.int32) for each in table),
        segments.held.astype(bool),
        *operands,
        drops_last=segments.drops_last,
        **attributes,
    )
    return made


def causal_convolution(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, pool: jax.Array, segments: Segments
) -> Results:
    """Returns `model_adapters.ops.causal_convolution`."""
    if weight.dtype != x.dtype:
        weight = weight.astype(jnp.float32)
    out, pool = _updated("tas_causal_convolution", x, [x, weight, ffi.or_empty(bias)], pool, segments)
    return out, pool


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    segments: Segments,
    *,
    is_normed: bool,
) -> Results:
    """Returns `model_adapters.ops.gated_delta_rule`."""
    dtype = v.dtype
    q, k, v = _in_one_dtype(q, k, v)
    operands = [q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32)]
    out, pool = _updated("tas_gated_delta_rule", v, operands, pool, segments, is_normed=bool(is_normed))
    return out.astype(dtype), pool


def state_space(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    dt_bias: jax.Array | None,
    pool: jax.Array,
    segments: Segments,
    *,
    dt_limit: tuple[float, float],
) -> Results:
    """Returns `model_adapters.ops.state_space`."""
    dtype = x.dtype
    x, b, c = _in_one_dtype(x, b, c)
    operands = [x, dt.astype(jnp.float32), a.astype(jnp.float32), b, c, ffi.or_empty(d), ffi.or_empty(dt_bias)]
    least, most = (np.float32(limit) for limit in dt_limit)
    out, pool = _updated("tas_state_space", x, operands, pool, segments, least=least, most=most)
    return out.astype(dtype), pool


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    pool: jax.Array,
    segments: Segments,
) -> Results:
    """Returns `model_adapters.ops.selective_scan`."""
    dtype = x.dtype
    x, b, c = _in_one_dtype(x, b, c)
    operands = [x, dt.astype(jnp.float32), a.astype(jnp.float32), b, c, ffi.or_empty(d)]
    out, pool = _updated("tas_selective_scan", x, operands, pool, segments)
    return out.astype(dtype), pool


def linear_recurrence(gates: jax.Array, x: jax.Array, pool: jax.Array, segments: Segments) -> Results:
    """Returns `model_adapters.ops.linear_recurrence`."""
    dtype = x.dtype
    gates, x = _in_one_dtype(gates, x)
    out, pool = _updated("tas_linear_recurrence", x, [gates, x], pool, segments)
    return out.astype(dtype), pool
