"""Lowerings of operators of which torchax 0.0.13 ignores or mistakes an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import default_env, get_lowering, is_view, jax_view, set_lowering, torch_view
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings.index_checks import check_known
from model_adapters.lowerings.integers import is_integer, long_dtype
from model_adapters.lowerings.narrow_floats import in_float32
from model_adapters.lowerings.reductions import jax_dtype


def install() -> None:
    """Registers the lowerings in torchax's table."""
    aten = torch.ops.aten
    for operator in (aten.var.correction, aten.var_mean.correction):
        set_lowering(operator, _of_all_axes(get_lowering(operator)))
    set_lowering(aten.linalg_vector_norm, _vector_norm(get_lowering(aten.linalg_vector_norm)))
    set_lowering(aten.put, _put)
    for packet in (aten.slice_scatter, aten.diagonal_scatter):
        set_lowering(packet, _counted_from_the_end(get_lowering(packet), packet is aten.diagonal_scatter))
    set_lowering(aten.scatter, _scatter(get_lowering(aten.scatter)))
    set_lowering(aten.repeat_interleave.self_int, _repeated)
    set_lowering(aten.repeat_interleave.self_Tensor, _repeated)
    set_lowering(aten.repeat_interleave.Tensor, lambda x, **size: _repeated(jnp.arange(x.shape[0]), x, **size))
    set_lowering(aten.addmv, _addmv)
    set_lowering(aten.addcmul, _addcmul)
    set_lowering(aten.hardtanh, _hardtanh)
    set_lowering(aten.bincount, _bincount)
    set_lowering(aten.logcumsumexp, lambda x, dim: in_float32(_logcumsumexp)(x, dim % x.ndim) if x.ndim else x)
    set_lowering(aten.embedding_renorm_, _renorm)
    _make_from_tensors()


def _of_all_axes(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a lowering for which no axis is all of them, as for PyTorch."""

    def reduced(x: jax.Array, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise RuntimeError(f"var and std: expected floats or complex numbers, got {x.dtype}; use .float()")
        dims = tuple(dim) or None if isinstance(dim, list | tuple) else dim
        return theirs(x, dims, correction=1 if correction is None else correction, keepdim=keepdim)

    return reduced


def _vector_norm(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a lowering of ``linalg.vector_norm``; that of zeros has the gradient 0."""

    def norm(x: jax.Array, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        if dtype is not None:
            x = x.astype(jax_dtype(dtype))
        dims = tuple(dim) or None if isinstance(dim, list | tuple) else dim
        if ord == 2 and x.ndim and jnp.issubdtype(x.dtype, jnp.floating):
            total = jnp.sum(x.astype(jnp.promote_types(x.dtype, jnp.float32)) ** 2, dims, keepdims=keepdim)
            return jnp.where(total == 0, 0, jnp.sqrt(jnp.where(total == 0, 1, total))).astype(x.dtype)
        return theirs(x, ord, dims, keepdim).astype(jnp.finfo(x.dtype).dtype)

    return norm


def _put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    """Computes ``torch.put``, which adds up what goes to one place."""
    check_known("put", x.size, index, from_end=True)
    at, values = x.reshape(-1).at[index.reshape(-1)], source.reshape(-1).astype(x.dtype)
    added = at.max if x.dtype == bool else at.add
    return (added(values) if accumulate else at.set(values)).reshape(x.shape)


def _counted_from_the_end(theirs: Callable[..., Any], has_two: bool) -> Callable[..., Any]:
    """Returns a lowering of a write into a part, with axes counted from the end."""

    def of_slice(x: jax.Array, source: jax.Array, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
        return theirs(x, source, dim % x.ndim, *args, **kwargs)

    def of_diagonal(x: jax.Array, source: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
        return theirs(x, source, offset, dim1 % x.ndim, dim2 % x.ndim)

    return of_diagonal if has_two else of_slice


def _scatter(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def scatter(x: jax.Array, dim: int, index: jax.Array, src: Any, reduce: str | None = None) -> Any:
        check_known("scatter", x.shape[dim] if x.ndim else 1, index)
        if jnp.ndim(src) == 0:
            src = jnp.full(index.shape, src, x.dtype)
        return theirs(x, dim, index, src, reduce)

    return scatter


def _repeated(x: jax.Array, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> jax.Array:
    """Computes ``torch.repeat_interleave``."""
    return jnp.repeat(x, repeats, dim, total_repeat_length=output_size)


def _addmv(x: jax.Array, matrix: jax.Array, vector: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """Computes ``torch.addmv``; with `beta` of 0, `x` is not read."""
    if is_integer(x):  # PyTorch takes the integers of both
        beta, alpha = int(beta), int(alpha)
    product = alpha * (matrix @ vector)
    return product if isinstance(beta, int | float) and not beta else beta * x + product


def _addcmul(x: jax.Array, first: jax.Array, second: jax.Array, *, value: Any = 1) -> jax.Array:
    """Computes ``torch.addcmul``, of integers with the integer of `value`."""
    dtype = jnp.result_type(x, first, second)
    if jnp.issubdtype(dtype, jnp.integer):
        return (x + jnp.asarray(int(value), dtype) * first * second).astype(dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    return (x.astype(wide) + value * first.astype(wide) * second.astype(wide)).astype(dtype)


def _hardtanh(x: jax.Array, min_val: Any = -1, max_val: Any = 1) -> jax.Array:
    """Computes ``hardtanh``, of integers between integers."""
    return jnp.clip(x, int(min_val), int(max_val)) if is_integer(x) else jnp.clip(x, min_val, max_val)


def _bincount(x: jax.Array, weights: jax.Array | None = None, minlength: int = 0) -> jax.Array:
    """Computes ``torch.bincount``; sums of weights are floats."""
    if weights is not None and is_integer(weights):
        weights = weights.astype(jax_dtype(torch.float64))
    counts: jax.Array = jnp.bincount(x, weights, minlength)
    return counts if weights is not None else counts.astype(long_dtype())


def _renorm(*args: Any) -> Any:
    raise UnsupportedModelError(
        "embedding: expected no max_norm, which changes the table at each look-up; limit the table's norms before"
    )


@jax.custom_jvp
def _cumulative_logs(x: jax.Array) -> jax.Array:
    return jax.lax.cumlogsumexp(x, axis=0)


@_cumulative_logs.defjvp
def _cumulative_logs_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Computes the derivative as a recurrence of factors of at most 1.

    JAX's own loses three digits.
    """
    (x,), (tangent,) = primals, tangents
    sums = _cumulative_logs(x)
    before = jnp.concatenate([jnp.full_like(sums[:1], -jnp.inf), sums[:-1]])
    known = jnp.where(jnp.isneginf(sums), 0, sums)
    kept, own = jnp.exp(before - known), jnp.exp(x - known)

    def joined(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return sums, jax.lax.associative_scan(joined, (kept, own * tangent))[1]


def _logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    """Computes ``torch.logcumsumexp``."""
    return jnp.moveaxis(_cumulative_logs(jnp.moveaxis(x, dim, 0)), 0, dim)


def _make_from_tensors() -> None:
    """Computes ranges and constants of numbers in the program.

    Others PyTorch makes on the host.
    """
    env = default_env()
    theirs = env.dispatch
    made: dict[Any, Callable[..., Any]] = {torch.linspace: _linspace, torch.logspace: _logspace, torch.full: _full}

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in made and any(map(is_view, (*args, *(kwargs or {}).values()))):
            return torch_view(made[func](*jax_view(args), **jax_view(kwargs or {})))
        return theirs(func, types, args, kwargs)

    env.dispatch = dispatch


def _wanted(dtype: torch.dtype | None) -> Any:
    return jax_dtype(dtype or torch.get_default_dtype())


def _full(size: Any, fill_value: jax.Array, *, dtype: torch.dtype | None = None, **kwargs: Any) -> jax.Array:
    """Computes ``torch.full`` of a number of the program."""
    is_float = dtype is None and jnp.issubdtype(fill_value.dtype, jnp.floating)
    return jnp.full(tuple(size), fill_value, _wanted(dtype) if dtype or is_float else fill_value.dtype)


def _linspace(
    start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, out: None = None, **kwargs: Any
) -> jax.Array:
    """Computes ``torch.linspace`` from both ends to the middle, as PyTorch does."""
    wanted = _wanted(dtype)
    inner = wanted if jnp.issubdtype(wanted, jnp.inexact) else jnp.float32
    first, last = (jnp.asarray(each).astype(wanted).astype(inner) for each in (start, end))
    numbers = jnp.arange(steps)
    step = (last - first) / max(steps - 1, 1)
    found = jnp.where(numbers < steps // 2, first + step * numbers, last - step * (steps - 1 - numbers))
    return (found if steps > 1 else jnp.full(steps, first)).astype(wanted)


def _logspace(
    start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> jax.Array:
    """Computes ``torch.logspace``."""
    is_inexact = jnp.issubdtype(_wanted(dtype), jnp.inexact)
    return (base ** _linspace(start, end, steps, dtype=dtype if is_inexact else torch.float32)).astype(_wanted(dtype))
