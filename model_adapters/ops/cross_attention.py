"""Attention of one query per row to stored keys and values, such as those of an encoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
from model_adapters.ops.attention_args import OPTIONAL_FIELDS, AttentionArgs, added_biases
from model_adapters.ops.cpu import attention as kernels
from model_adapters.ops.kv_pool import check_int_array, checked_args, expect, softmax_times_values

OP = "cross_attention"
TAKEN = frozenset({"softcap", "position_biases"})
"""Fields of `AttentionArgs` that the op has; others depend on the position of the query."""


def cross_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, page_table: jax.Array, lens: jax.Array, args: AttentionArgs
) -> jax.Array:
    """Returns the attention of each row's query to the first keys of its pages.

    Args:
        q: Queries ``[B, Hq, D]``; query head ``i`` reads kv head ``i // (Hq // H)``.
        keys: Pages ``[P, H, page, D]``, of a float dtype.
        values: Pages ``[P, H, page, Dv]``.
        page_table: ``int32[B, pages_per_row]``, the page of each run of ``page`` positions.
        lens: ``int32[B]``, the number of keys of each row.
        args: Scale and features of the scores: ``softcap`` or ``position_biases``.

    Returns:
        ``[B, Hq, Dv]`` in q's dtype (softmax and sums in float32; zeros where ``lens`` is 0).

    Raises:
        InvalidArgumentError: shapes that do not fit together, or another feature in `args`.
    """
    for name, array, rank in (("q", q, 3), ("keys", keys, 4), ("values", values, 4), ("page_table", page_table, 2)):
        expect(OP, f"{name} of rank", rank, array.ndim)
    batch, query_heads, dim = q.shape
    heads = keys.shape[1]
    if heads == 0 or query_heads % heads:
        raise InvalidArgumentError(f"{OP}: expected query heads a multiple of kv heads, got {query_heads} and {heads}")
    expect(OP, "keys of width", dim, keys.shape[3])
    expect(OP, "values of shape", keys.shape[:3], values.shape[:3])
    page_table = check_int_array(OP, "page_table", page_table, (batch, page_table.shape[1]))
    lens = check_int_array(OP, "lens", lens, (batch,))
    for name in OPTIONAL_FIELDS:
        if name not in TAKEN and getattr(args, name) is not None:
            raise InvalidArgumentError(
                f"{OP}: expected args with {' or '.join(sorted(TAKEN))} alone; {name} is not implemented"
            )
    args = checked_args(OP, args, query_heads, batch, batch)
    out: jax.Array = registry.call(OP, q, keys, values, page_table, lens, args)
    return out


@registry.define(OP, "one query per row on stored keys and values, of which none is behind it")
def reference(
    q: jax.Array, keys: jax.Array, values: jax.Array, page_table: jax.Array, lens: jax.Array, args: AttentionArgs
) -> jax.Array:
    """Gathers each row's pages and computes in float32.

    Supports every shape, dtype and platform.
    """
    batch, query_heads, dim = q.shape
    heads = keys.shape[1]

    def dense(pages: jax.Array) -> jax.Array:
        gathered = jnp.take(pages, page_table, axis=0, mode="clip")  # [B, pages, H, page, width]
        return jnp.moveaxis(gathered, 2, 1).reshape(batch, heads, -1, pages.shape[3]).astype(jnp.float32)

    grouped = q.reshape(batch, heads, query_heads // heads, dim).astype(jnp.float32)
    scores = jnp.einsum("bhgd,bhsd->bhgs", grouped, dense(keys), precision=jax.lax.Precision.HIGHEST) * args.scale
    if args.softcap is not None:
        scores = args.softcap * jnp.tanh(scores / args.softcap)
    if args.position_biases is not None:
        scores = added_biases(scores, args.position_biases)
    visible = (jnp.arange(scores.shape[3]) < lens[:, None])[:, None]  # [B, 1, S]
    out = softmax_times_values(scores, visible[:, :, None], dense(values), visible[..., None], None)
    return out.reshape(batch, query_heads, -1).astype(q.dtype)


def _kernel_unsupported_reason(
    q: jax.Array, keys: jax.Array, values: jax.Array, page_table: jax.Array, lens: jax.Array, args: AttentionArgs
) -> str | None:
    if keys.dtype != values.dtype:
        return f"keys are {keys.dtype} and values {values.dtype}"
    return kernels.attention_unsupported_reason(q, keys, values, keys, args)


registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)(kernels.cross_attention)
