"""Lowerings of determinants and factorizations, with all their arguments and signs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import set_lowering


def install() -> None:
    """Registers the lowerings in torchax's table."""
    for function in (torch.det, torch.Tensor.det, torch.linalg.det):
        set_lowering(function, jnp.linalg.det)
    for function in (torch.logdet, torch.Tensor.logdet):
        set_lowering(function, _logdet)
    set_lowering(torch.ops.aten._linalg_eigh, _eigh)
    set_lowering(torch.ops.aten.linalg_cholesky_ex, _cholesky_ex)
    set_lowering(torch.ops.aten.linalg_pinv.atol_rtol_tensor, _pinv)
    for function in (torch.qr, torch.Tensor.qr):
        set_lowering(function, lambda x, some=True: jnp.linalg.qr(x, mode="reduced" if some else "complete"))


def _logdet(x: jax.Array) -> jax.Array:
    """Computes ``torch.logdet``: NaN where the determinant is negative."""
    sign, logs = jnp.linalg.slogdet(x)
    return jnp.where(sign < 0, jnp.nan, logs)


def _eigh(x: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    """Computes ``torch.linalg.eigh`` of one triangle; JAX takes the mean of both."""
    part = jnp.tril(x, -1) if UPLO.upper() == "L" else jnp.triu(x, 1)
    diagonal = jnp.real(jnp.diagonal(x, axis1=-2, axis2=-1))[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)
    values, vectors = jnp.linalg.eigh(part + part.mT.conj() + diagonal, symmetrize_input=False)
    return values, vectors


def _cholesky_ex(x: jax.Array, *, upper: bool = False, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    """Computes ``torch.linalg.cholesky_ex``, with the first minor that is not positive."""
    if not x.size:
        return x, jnp.zeros(x.shape[:-2], jnp.int32)
    part = jnp.triu(x).mT.conj() if upper else jnp.tril(x)
    found = jax.lax.linalg.cholesky(part, symmetrize_input=False)
    full = part + jnp.tril(part, -1).mT.conj()

    def eliminated(k: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, pivots = state
        pivot = jnp.real(rest[..., k, k])
        column = rest[..., :, k]
        rest = rest - column[..., :, None] * column[..., None, :].conj() / pivot[..., None, None]
        return rest, pivots.at[..., k].set(pivot)

    start = full, jnp.real(jnp.zeros(x.shape[:-1], x.dtype))
    is_wrong = ~(jax.lax.fori_loop(0, x.shape[-1], eliminated, start)[1] > 0)
    info = jnp.where(is_wrong.any(-1), jnp.argmax(is_wrong, -1) + 1, 0).astype(jnp.int32)
    return (found.mT.conj() if upper else found), info


def _pinv(
    x: jax.Array, *, atol: jax.Array | None = None, rtol: jax.Array | None = None, hermitian: bool = False
) -> jax.Array:
    """Computes ``torch.linalg.pinv``.

    Singular values up to `atol`, or `rtol` times the largest, count as 0.
    """
    u, values, vh = jnp.linalg.svd(x, full_matrices=False)
    least = jnp.finfo(values.dtype).eps * max(x.shape[-2:])
    if rtol is None:
        rtol = jnp.asarray(least) if atol is None else jnp.where(atol > 0, 0, least)
    limit = jnp.asarray(rtol)[..., None] * values[..., :1]
    limit = limit if atol is None else jnp.maximum(limit, jnp.asarray(atol)[..., None])
    inverse = jnp.where(values > limit, 1 / jnp.where(values > limit, values, 1), 0).astype(x.dtype)
    return (vh.mT.conj() * inverse[..., None, :]) @ u.mT.conj()
