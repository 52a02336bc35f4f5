"""Matrix products with PyTorch's semantics, summed in float32.

XLA on a CPU converts all weights to float32 for a product of one bfloat16 row; a bfloat16 *result* is 9 times slower
than a float32 one and a cast; float16 is converted number by number. So the C++ product of `cpu/product.h` is used
where it can be built. Its outputs are bit-equal for any number of rows, except that up to four rows of a 16-bit type
are summed in another order (`cpu/few_rows.h`), which reads weights a third faster, unless `ffi.batch_invariant` asks
for one order.

GFLOP/s with weights of 3072 x 1024, eight of them in turns so that most come from memory (2 cores of an AVX-512 server
processor with 44 to 51 GB/s, 986 GFLOP/s in bfloat16 and 493 in float32; best of ten):

=====  =========  ===  =========  ===
rows   bfloat16:  XLA  float32:   XLA
=====  =========  ===  =========  ===
1      60         22   18         11
4      240        99   73         42
16     634        308  191        130
32     765        410  415        201
128    859        722  422        365
512    915        647  457        445
=====  =========  ===  =========  ===

float16: 48 against 2 at one row, 389 against 150 at 128. With tile registers (`cpu/tile_product.h`) 2 cores have 1.1
to 1.6 times XLA's rate in bfloat16 for 64 to 2048 rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, spmd
from model_adapters.ops.compressed_weight import before_turn, compressed_of, lora_of, note_turned, quantized_of
from model_adapters.ops.cpu import ffi
from model_adapters.ops.cpu.batching import divided, merged
from model_adapters.ops.lora_weight import add_adapters

OP = "linear"
MAX_KERNEL_ROWS = 8  # of each of a batch of products for which the kernel is faster than XLA's
MIN_ROWS = 4  # rows that a 16-bit product is padded to: XLA is slow with fewer
HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype that products of `dtype` are summed in, at least float32."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


def precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Returns the precision of products of `dtype`: full from float32 on, as in PyTorch."""
    return jax.lax.Precision.HIGHEST if accumulator(dtype) == dtype else jax.lax.Precision.DEFAULT


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Returns ``x[..., in] @ weight[out, in].T + bias[out]`` in x's dtype.

    Raises:
        InvalidArgumentError: `x` and `weight` differ in dtype or in their last dimension.
    """
    if x.dtype != weight.dtype or x.ndim == 0 or weight.ndim not in (1, 2) or x.shape[-1] != weight.shape[-1]:
        raise InvalidArgumentError(
            f"linear: expected x[..., in] and weight[out, in] of one dtype, got {x.dtype}{list(x.shape)} and "
            f"{weight.dtype}{list(weight.shape)}"
        )
    if weight.ndim == 1:
        return linear(x, weight[None], bias)[..., 0]
    rows = x.reshape(-1, x.shape[-1])
    out = registry.call(OP, rows, weight, bias).reshape(*x.shape[:-1], weight.shape[0])
    return add_adapters(out, x, lora_of(weight))


def finish(sums: jax.Array, bias: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Returns ``sums[rows, out]`` plus ``bias[out]``, rounded to `dtype` once."""
    return (sums if bias is None else sums + bias.astype(sums.dtype)).astype(dtype)


def product_sums(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns XLA's ``x[rows, in] @ weight[out, in].T`` in the accumulator's dtype."""
    sums = jax.lax.dot_general(
        pad_one_row(x),
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=accumulator(x.dtype),
    )
    return sums[: x.shape[0]]


def pad_one_row(x: jax.Array) -> jax.Array:
    """Returns ``x[rows, in]``, one row with three of zeros behind it where XLA is slow with one.

    For v5e and v6e XLA multiplies and adds one row on the vector unit, by its estimates in 20 and 3 times the cycles
    of the matrix unit, which it uses from two rows on. Later chips have one row on the matrix unit.
    """
    if x.shape[0] != 1 or registry.platform() != "tpu":
        return x
    from jax.experimental.pallas import tpu as pltpu  # half a second, which only a TPU has use for

    is_later = pltpu.is_tpu_device() and pltpu.get_tpu_info().generation >= 7
    return x if is_later else pad_rows_to(x, 0, MIN_ROWS)


@registry.define(OP, "x[rows, in] times weight[out, in] transposed, plus bias")
def reference(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes XLA's own product."""
    return finish(product_sums(x, weight), bias, x.dtype)


def _padding_unsupported_reason(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> str | None:
    return None if x.dtype in HALF else f"x is {x.dtype}; only 16-bit floats need their rows padded"


@registry.register(OP, "padded", ("cpu",), unsupported_reason=_padding_unsupported_reason)
def padded(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes XLA's own product of at least four rows."""
    num_rows = x.shape[0]
    return reference(pad_rows_to(x, 0, MIN_ROWS), weight, bias)[:num_rows]


def _kernel_unsupported_reason(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> str | None:
    if (reason := ffi.unsupported_reason(x)) is not None:
        return reason
    limit = ffi.max_linear_rows(x.dtype)
    if limit is not None and x.shape[0] > limit and not ffi.is_batch_invariant():
        return f"{x.shape[0]} rows of {x.dtype}; the kernel is for up to {limit} on this processor"
    return None if x.shape[0] else "no rows"


@registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)
def weight_streaming(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes with the C++ kernel."""
    return _differentiable(x, weight, bias)


def _packed_unsupported_reason(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> str | None:
    if compressed_of(weight) is None:
        return "the weight is not packed"
    return None if x.shape[0] else "no rows"


@registry.register(OP, "cpu-packed", ("cpu",), unsupported_reason=_packed_unsupported_reason, takes_precedence=True)
def packed(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes with a compressed weight, bit-equal to the batch-invariant product."""
    compressed = compressed_of(weight)
    assert compressed is not None
    return ffi.packed_linear(x, compressed.groups, compressed.index, bias, compressed.num_rows)


def _kernel(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    def folded(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        """Computes rows of a ``vmap``, of which there may be too many for the kernel."""
        out: jax.Array = registry.call(OP, x, weight, bias if bias.size else None)
        return out

    return ffi.linear(x, weight, bias, x.dtype, folded)


_differentiable = ffi.differentiable(_kernel, reference)


def not_invariant_reason() -> str | None:
    """Returns why `ffi.batch_invariant` cannot be guaranteed here, or None."""
    if registry.platform() != "cpu":
        return f"products on a {registry.platform()} are its compiler's"
    if (reason := ffi.missing()) is not None:
        return f"no C++ kernels: {reason}"
    return None


def skips_equal_rows() -> bool:
    """Returns whether products compute equal rows at the end once (`cpu/repeated_rows.h`)."""
    has_limit = ffi.max_linear_rows(jnp.dtype(jnp.bfloat16)) is not None  # the C++ kernels, for any number of rows
    return not_invariant_reason() is None and not has_limit


def pad_rows_to(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Returns `x` padded with zeros to at least `size` along `axis`."""
    missing = size - x.shape[axis]
    if missing <= 0:
        return x
    return jnp.pad(x, [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)])


def batched_sums(a: jax.Array, b: jax.Array, *, is_input_major: bool = True) -> jax.Array:
    """Returns ``a[..., n, k]`` times matrices of equal leading axes, in the accumulator's dtype.

    On a CPU few rows are a C++ kernel's: XLA converts all of `b` to float32, and copies it where its axes are
    exchanged.

    Args:
        a: ``[..., n, k]``.
        b: ``[..., k, m]``, or ``[..., m, k]`` without `is_input_major`.
        is_input_major: Order of b's last axes.

    Returns:
        ``[..., n, m]``.
    """
    wide, num_rows = accumulator(a.dtype), a.shape[-2]
    if num_rows <= MAX_KERNEL_ROWS and has_row_kernels(a) and a.size and b.size:
        left, right = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
        out: jax.Array = _ROW_KERNELS[is_input_major](left, right)
        return out.reshape(*a.shape[:-1], out.shape[-1])
    if a.dtype in HALF and registry.platform() == "cpu":
        a = pad_rows_to(a, -2, MIN_ROWS)
    subscripts = "...nk,...km->...nm" if is_input_major else "...nk,...mk->...nm"
    return jnp.einsum(subscripts, a, b, precision=precision(a.dtype), preferred_element_type=wide)[..., :num_rows, :]


def has_row_kernels(a: jax.Array) -> bool:
    """Returns whether products of few rows like ``a[..., n, k]`` have a kernel here."""
    return registry.platform() == "cpu" and spmd.mesh_in_use() is None and ffi.unsupported_reason(a) is None


def _row_kernel(is_input_major: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the C++ kernel of ``a[B, n, k]`` times a matrix for each of B, with derivatives."""

    def kernel(a: jax.Array, b: jax.Array) -> jax.Array:
        batch, num_rows, size = a.shape
        ids = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), num_rows)[:, None]
        wide = accumulator(a.dtype)
        out = ffi.routed_linear(a.reshape(-1, size), ids, b, None, is_input_major=is_input_major, dtype=wide)
        return out.reshape(batch, num_rows, -1)

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        subscripts = "bnk,bkm->bnm" if is_input_major else "bnk,bmk->bnm"
        wide = accumulator(a.dtype)
        return jnp.einsum(subscripts, a, b, precision=precision(a.dtype), preferred_element_type=wide)

    run = custom_vmap(kernel)

    @run.def_vmap
    def rule(axis_size: int, is_batched: list[bool], a: jax.Array, b: jax.Array) -> tuple[jax.Array, bool]:
        if is_batched[1]:
            return divided(run(merged(a, axis_size, is_batched[0]), merged(b, axis_size, True)), axis_size), True
        _, batch, num_rows, size = a.shape
        out = run(jnp.swapaxes(a, 0, 1).reshape(batch, -1, size), b)  # the same matrices for all
        return jnp.swapaxes(out.reshape(batch, axis_size, num_rows, -1), 0, 1), True

    return ffi.differentiable(run, plain)


def _matmul_sums(a: jax.Array, b: jax.Array, name: str) -> jax.Array:
    """Returns ``a[..., n, k] @ b[..., k, m]`` in the accumulator's dtype."""
    if a.ndim == 0 or b.ndim == 0 or a.dtype != b.dtype or a.shape[-1] != b.shape[0 if b.ndim == 1 else -2]:
        raise InvalidArgumentError(
            f"{name}: expected [..., n, k] and [..., k, m] of one dtype, got {a.dtype}{list(a.shape)} and "
            f"{b.dtype}{list(b.shape)}"
        )
    if b.ndim == 2 and a.ndim > 2:
        rows = _matmul_sums(a.reshape(-1, a.shape[-1]), b, name)  # one product of many rows, not a batch of few
        return rows.reshape(*a.shape[:-1], b.shape[1])
    if a.ndim == b.ndim > 2 and a.shape[:-2] == b.shape[:-2] and a.shape[-2] <= MAX_KERNEL_ROWS and has_row_kernels(a):
        stored = before_turn(b)
        return batched_sums(a, b if stored is None else stored, is_input_major=stored is None)
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    num_rows, num_columns = left.shape[-2], right.shape[-1]
    if b.ndim == 2 and left.ndim == 2:
        left = pad_one_row(left)
    if a.dtype in HALF and registry.platform() == "cpu":
        left, right = pad_rows_to(left, -2, MIN_ROWS), pad_rows_to(right, -1, MIN_ROWS)
    sums = jnp.matmul(left, right, precision=precision(a.dtype), preferred_element_type=accumulator(a.dtype))
    sums = sums[..., :num_rows, :num_columns]
    if b.ndim == 1:
        sums = sums[..., 0]
    return sums[..., 0, :] if a.ndim == 1 and b.ndim > 1 else (sums[..., 0] if a.ndim == 1 else sums)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns ``a[..., n, k] @ b[..., k, m]`` in their dtype, as ``torch.matmul``.

    Raises:
        InvalidArgumentError: dtypes or inner dimensions that differ, or a scalar.
    """
    out = _times_quantized(a, b)
    return _matmul_sums(a, b, "matmul").astype(a.dtype) if out is None else out


def _times_quantized(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array | None:
    """Returns ``x[..., in] @ weight[in, out] + bias[out]`` for a quantized weight, or None.

    The weight has to be quantized by rows of ``[out, in]``.
    """
    found = quantized_of(weight)
    fits = found is not None and found.scheme.transposed and weight.ndim == 2 and x.ndim > 0 and x.dtype == weight.dtype
    if not fits or (bias is not None and bias.ndim != 1) or x.shape[-1] != weight.shape[0]:
        return None
    turned = weight.T
    note_turned(weight, turned)
    return linear(x, turned, bias)


def _add(bias: jax.Array, sums: jax.Array, beta: float, alpha: float, dtype: jnp.dtype) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.inexact):  # torch takes the integers of both then
        beta, alpha = int(beta), int(alpha)
    if alpha != 1:
        sums = sums * alpha
    if beta == 0:  # torch does not read the bias then, which may hold NaN
        return sums.astype(dtype)
    bias = bias.astype(sums.dtype)
    return (sums + (bias if beta == 1 else bias * beta)).astype(dtype)


def addmm(bias: jax.Array, x: jax.Array, weight: jax.Array, *, beta: float = 1.0, alpha: float = 1.0) -> jax.Array:
    """Returns ``beta * bias + alpha * (x[rows, in] @ weight[in, out])``, as ``torch.addmm``."""
    if beta == alpha == 1 and (out := _times_quantized(x, weight, bias)) is not None:
        return out
    out = _add(bias, _matmul_sums(x, weight, "addmm"), beta, alpha, x.dtype)
    return add_adapters(out, x, lora_of(weight))


def bmm(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns ``a[B, n, k] @ b[B, k, m]``, as ``torch.bmm``."""
    return _matmul_sums(a, b, "bmm").astype(a.dtype)


def baddbmm(bias: jax.Array, a: jax.Array, b: jax.Array, *, beta: float = 1.0, alpha: float = 1.0) -> jax.Array:
    """Returns ``beta * bias + alpha * (a[B, n, k] @ b[B, k, m])``, as ``torch.baddbmm``."""
    return _add(bias, _matmul_sums(a, b, "baddbmm"), beta, alpha, a.dtype)


def einsum(equation: str, *operands: jax.Array) -> jax.Array:
    """Returns ``torch.einsum`` of operands of one dtype, in that dtype.

    Raises:
        InvalidArgumentError: operands of several dtypes.
    """
    dtype = operands[0].dtype
    if any(operand.dtype != dtype for operand in operands):
        raise InvalidArgumentError(
            f"einsum: expected operands of one dtype, got {', '.join(str(operand.dtype) for operand in operands)}"
        )
    sums = jnp.einsum(equation, *operands, precision=precision(dtype), preferred_element_type=accumulator(dtype))
    return sums.astype(dtype)


spmd.leave_to_partitioner(OP, reference)
_ROW_KERNELS = {is_input_major: _row_kernel(is_input_major) for is_input_major in (False, True)}
