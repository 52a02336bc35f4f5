"""Attention of one new token per row to a paged cache, with the write of that token's key and value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
from model_adapters.ops.cpu import kernels

OP = "decode_attention"


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes the new token of every row to the cache and attends its query to what the row can see.

    Args:
        q: Queries ``[B, Hq, D]``; query head ``i`` reads kv head ``i // (Hq // H)``.
        k: The new token's keys ``[B, H, D]``.
        v: The new token's values ``[B, H, Dv]``.
        pool: Pages ``[P, H, page, D + Dv]``, keys and values side by side. Donate it: it is updated in place.
        page_table: ``int32[B, pages_per_seq]``, the page of each run of ``page`` positions. For one contiguous cache
            per row: ``P = B``, ``page`` the capacity, and ``arange(B)[:, None]``.
        lens: ``int32[B]``, the length of each row with its new token, which is written at position ``lens - 1``. A
            length beyond the row's pages writes nothing and attends to what they hold; 0 writes nothing, gives zeros.
        starts: ``int32[B]``, the first visible position (left padding).
        sinks: ``[Hq]`` logits that take part in the softmax and carry no value, or None.
        scale: Multiplies the products of queries and keys.
        window: Attend to the last `window` positions, the new one among them; None for all.
        softcap: Scores ``s`` become ``softcap * tanh(s / softcap)``; None for none.

    Returns:
        ``[B, Hq, Dv]`` in q's dtype (softmax and sums in float32; zeros where ``lens <= starts``), and the pool.
        Page numbers outside the pool are not written to, and read as the nearest page.

    Raises:
        InvalidArgumentError: shapes that do not fit together, or a window or soft cap that is not positive.
    """
    _check(q, k, v, pool, page_table, lens, starts, sinks, window, softcap)
    out, pool = registry.call(
        OP, q, k, v, pool, page_table, lens, starts, sinks, scale=scale, window=window, softcap=softcap
    )
    return out, pool


def _expect(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise InvalidArgumentError(f"decode_attention: expected {what} {expected}, got {got}")


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    sinks: jax.Array | None,
    window: int | None,
    softcap: float | None,
) -> None:
    for name, array, rank in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("pool", pool, 4), ("page_table", page_table, 2)):
        _expect(f"{name} of rank", rank, array.ndim)
    batch, query_heads, dim = q.shape
    heads = k.shape[1]
    if heads == 0 or query_heads % heads:
        raise InvalidArgumentError(
            f"decode_attention: expected query heads a multiple of kv heads, got {query_heads} and {heads}"
        )
    _expect("k of shape", (batch, heads, dim), k.shape)
    _expect("v of shape", (batch, heads, v.shape[2]), v.shape)
    _expect("a pool with [kv heads, page, D + Dv] =", (heads, pool.shape[2], dim + v.shape[2]), pool.shape[1:])
    _expect("page_table rows", batch, page_table.shape[0])
    _expect("lens of shape", (batch,), lens.shape)
    _expect("starts of shape", (batch,), starts.shape)
    if sinks is not None:
        _expect("sinks of shape", (query_heads,), sinks.shape)
    if window is not None and window < 1:
        raise InvalidArgumentError(f"decode_attention: expected a window of at least 1 or None, got {window}")
    if softcap is not None and softcap <= 0:
        raise InvalidArgumentError(f"decode_attention: expected a positive softcap or None, got {softcap}")


def write_token(k: jax.Array, v: jax.Array, pool: jax.Array, page_table: jax.Array, lens: jax.Array) -> jax.Array:
    """The pool with each row's new key and value at position ``lens - 1``; without one, nothing is written."""
    num_pages, heads, page, width = pool.shape
    last = lens.astype(jnp.int32) - 1
    column = last // page
    pages = jnp.take_along_axis(page_table, jnp.clip(column, 0, page_table.shape[1] - 1)[:, None], axis=1)[:, 0]
    writable = (last >= 0) & (column < page_table.shape[1]) & (pages >= 0) & (pages < num_pages)
    rows = (pages[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)) * page + (last % page)[:, None]
    rows = jnp.where(writable[:, None], rows, num_pages * heads * page)  # out of bounds, hence dropped
    token = jnp.concatenate([k, v], axis=-1).astype(pool.dtype)
    # One flat row per token and head: XLA keeps this scatter in place, unlike one over (page, :, slot).
    return pool.reshape(-1, width).at[rows].set(token, mode="drop").reshape(pool.shape)


@registry.define(OP, "one query per row on a paged cache, with the write of the new token")
def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers each row's pages and computes in float32; right for every shape, dtype and platform."""
    batch, query_heads, dim = q.shape
    heads = k.shape[1]
    pool = write_token(k, v, pool, page_table, lens)
    gathered = jnp.take(pool, page_table, axis=0, mode="clip")  # [B, pages, H, page, D + Dv]
    gathered = jnp.moveaxis(gathered, 2, 1).reshape(batch, heads, -1, pool.shape[3]).astype(jnp.float32)
    keys, values = gathered[..., :dim], gathered[..., dim:]
    grouped = q.reshape(batch, heads, query_heads // heads, dim).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhgd,bhsd->bhgs", grouped, keys, precision=exact) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    positions = jnp.arange(keys.shape[2], dtype=jnp.int32)
    first = starts if window is None else jnp.maximum(starts, lens - window)
    visible = (positions >= first[:, None]) & (positions < lens[:, None])  # [B, S]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, heads, -1, 1)
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isneginf(top), 0.0, top)  # nothing visible: keeps exp(-inf - -inf) out
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    weights = weights / jnp.where(total == 0, 1.0, total)
    seen = jnp.where(visible[:, None, :, None], values, 0.0)  # a weight of 0 times whatever lies in an unused page
    out = jnp.einsum("bhgs,bhsd->bhgd", weights, seen, precision=exact)
    return out.reshape(batch, query_heads, -1).astype(q.dtype), pool


def _kernel_refuses(q: jax.Array, k: jax.Array, v: jax.Array, pool: jax.Array, *args: Any, **kwargs: Any) -> str | None:
    if (q.dtype, pool.dtype) not in kernels.DECODE_DTYPES:
        return (
            f"q is {q.dtype} and pool {pool.dtype}; the kernel has one float dtype for both, or float32 over bfloat16"
        )
    return kernels.missing()


registry.register(OP, "cpu-ffi", ("cpu",), refuses=_kernel_refuses)(kernels.decode_attention)
