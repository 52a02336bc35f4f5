"""Lowerings of matrix functions and distances in which torchax 0.0.13 differs from PyTorch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import set_lowering
from model_adapters.errors import UnsupportedModelError


def install() -> None:
    """Registers the lowerings in torchax's table."""
    if hasattr(torch.ops.aten, "cholesky"):  # torch has it no more from 2.14 on
        set_lowering(torch.ops.aten.cholesky, _cholesky)
    set_lowering(torch.ops.aten.cholesky_solve, _cholesky_solve)
    set_lowering(torch.ops.aten.cholesky_inverse, _cholesky_inverse)
    set_lowering(torch.cdist, _cdist)
    set_lowering(torch.ops.aten.lu_unpack, _lu_unpack)
    set_lowering(torch.linalg.solve, _solve)
    set_lowering(torch.linalg.solve_ex, _solve_ex)
    set_lowering(torch.ops.aten.linalg_householder_product, _householder_product)


def _turned(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2).conj()


def _cholesky(x: jax.Array, upper: bool = False) -> jax.Array:
    """Computes ``torch.cholesky``: of one triangle, with the gradient of a symmetric matrix."""
    part = jnp.triu(x) if upper else jnp.tril(x)
    other = _turned(jnp.triu(x, 1) if upper else jnp.tril(x, -1))
    mean = (x + _turned(x)) / 2
    factor = jnp.linalg.cholesky(mean + jax.lax.stop_gradient(part + other - mean))
    return _turned(factor) if upper else factor


def _cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    """Computes ``torch.cholesky_solve`` of `b` [..., n, k] and `factor` [..., n, n]."""
    lower = _turned(factor) if upper else factor
    batch = jnp.broadcast_shapes(b.shape[:-2], lower.shape[:-2])
    lower, b = (jnp.broadcast_to(each, (*batch, *each.shape[-2:])) for each in (jnp.tril(lower), b))
    half = jax.lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)
    return jax.lax.linalg.triangular_solve(
        lower, half, left_side=True, lower=True, transpose_a=True, conjugate_a=jnp.iscomplexobj(lower)
    )


def _cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    """Computes ``torch.cholesky_inverse`` of `factor` [..., n, n]."""
    return _cholesky_solve(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


def _solve(a: jax.Array, b: jax.Array, *, left: bool = True) -> jax.Array:
    """Computes ``torch.linalg.solve`` of `a` [..., n, n] and `b` [..., n, k] or [..., n].

    torchax 0.0.13 takes matrices of the shape of `a` for vectors.
    """
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if is_vector:
        solved: jax.Array = jnp.linalg.solve(a, b[..., None])[..., 0]
    elif left:
        solved = jnp.linalg.solve(a, b)
    else:
        solved = jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)), -1, -2)
    return solved


def _solve_ex(
    a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes ``torch.linalg.solve_ex``."""
    if check_errors:
        raise UnsupportedModelError(
            "torch.linalg.solve_ex: expected check_errors=False, got True; values are not known while tracing"
        )
    return _solve(a, b, left=left), jnp.zeros(a.shape[:-2], jnp.int32)


def _cdist(a: jax.Array, b: jax.Array, p: float = 2.0, compute_mode: str | None = None) -> jax.Array:
    """Computes ``torch.cdist`` of `a` [..., n, k] and `b` [..., m, k]."""
    apart = jnp.abs(a[..., :, None, :] - b[..., None, :, :])
    if p == 0:
        return jnp.sum(apart != 0, -1).astype(a.dtype)
    if p == 1:
        return jnp.sum(apart, -1)
    if math.isinf(p):
        return jnp.max(apart, -1, initial=0)
    is_zero = apart == 0
    sums = jnp.sum(jnp.where(is_zero, 0, jnp.where(is_zero, 1, apart) ** p), -1)
    return jnp.where(sums == 0, 0, jnp.where(sums == 0, 1, sums) ** (1 / p))


def _lu_unpack(
    factors: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes ``torch.lu_unpack`` of `factors` [..., m, n] and `pivots` from 1."""
    num_rows, num_columns = factors.shape[-2:]
    rank, empty = min(num_rows, num_columns), jnp.zeros(0, factors.dtype)
    turns = lower = upper = empty
    if unpack_pivots:
        order = jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, num_rows)
        turns = jnp.swapaxes(jax.nn.one_hot(order, num_rows, dtype=factors.dtype), -1, -2)
    if unpack_data:
        lower = jnp.tril(factors[..., :rank], -1) + jnp.eye(num_rows, rank, dtype=factors.dtype)
        upper = jnp.triu(factors[..., :rank, :])
    return turns, lower, upper


def _householder_product(vectors: jax.Array, factors: jax.Array) -> jax.Array:
    """Computes ``torch.linalg.householder_product``.

    `vectors` are [..., m, n], `factors` [..., k]. JAX has it without a gradient.
    """
    num_rows, num_columns = vectors.shape[-2:]
    start = jnp.broadcast_to(jnp.eye(num_rows, num_columns, dtype=vectors.dtype), vectors.shape)
    turning = (jnp.tril(vectors, -1) + start)[..., : factors.shape[-1]]

    def reflected(product: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        vector, factor = one  # [..., m], [...]
        shares = jnp.einsum("...m,...mn->...n", vector.conj(), product)
        return product - (factor[..., None] * vector)[..., None] * shares[..., None, :], None

    rows = jnp.moveaxis(turning, -1, 0), jnp.moveaxis(factors, -1, 0)
    product, _ = jax.lax.scan(reflected, start, rows, reverse=True)
    return product
