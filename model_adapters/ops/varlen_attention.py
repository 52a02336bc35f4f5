"""Attention within texts that stand one after the other in one row, without a cache.

The layout is that of flash-attention's ``varlen`` functions: nothing is padded, and no text sees another.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
from model_adapters.ops.attention_args import AttentionArgs, unsupported_field
from model_adapters.ops.cpu import attention as kernels
from model_adapters.ops.cpu.ffi import DTYPES, unsupported_reason
from model_adapters.ops.kv_pool import check_int_array, expect, softmax_times_values
from model_adapters.ops.paged_attention import block_len, by_block, padded
from model_adapters.ops.searchsorted import num_at_most

OP = "varlen_attention"
TAKEN = frozenset({"window", "softcap", "sinks", "sees_until"})
"""Fields of `AttentionArgs` besides the scale that the op has."""


def varlen_attention(q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array, args: AttentionArgs) -> jax.Array:
    """Returns the attention of each token to the tokens of its own text.

    The query at position ``p`` of a text sees the keys ``j`` with ``p - window < j <= p``, and those with
    ``p <= j <= sees_until``. Positions count from 0 in each text.

    Args:
        q: Queries ``[T, Hq, D]`` of S texts; query head ``i`` reads kv head ``i // (Hq // H)``.
        k: Keys ``[H, T, D]``.
        v: Values ``[H, T, Dv]``.
        cu_seqlens: ``int32[S + 1]``, ascending from 0: text ``s`` has the tokens ``cu_seqlens[s]`` to
            ``cu_seqlens[s + 1]``. Tokens from ``cu_seqlens[S]`` on are padding: they see nothing, nothing sees them,
            and their output is zero, or that of the last token in use.
        args: Scale and features of the scores: ``window``, ``softcap``, ``sinks``, ``sees_until``.

    Returns:
        ``[T, Hq, Dv]`` in q's dtype (softmax and sums in float32).

    Raises:
        InvalidArgumentError: shapes that do not fit together, or another feature in `args`.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        expect(OP, f"{name} of rank", 3, array.ndim)
    num_tokens, query_heads, dim = q.shape
    if k.shape[0] == 0 or query_heads % k.shape[0]:
        raise InvalidArgumentError(
            f"{OP}: expected query heads a multiple of kv heads, got {query_heads} and {k.shape[0]}"
        )
    expect(OP, "k of shape", (k.shape[0], num_tokens, dim), k.shape)
    expect(OP, "v of shape", k.shape[:2], v.shape[:2])
    cu_seqlens = check_int_array(OP, "cu_seqlens", cu_seqlens, cu_seqlens.shape)
    if (reason := unsupported_field(args, TAKEN)) is not None:
        raise InvalidArgumentError(f"{OP}: expected args with {', '.join(sorted(TAKEN))} alone; {reason}")
    if args.sees_until is not None:
        until = check_int_array(OP, "args.sees_until", args.sees_until, (num_tokens,))
        args = dataclasses.replace(args, sees_until=until)
    out: jax.Array = registry.call(OP, q, k, v, cu_seqlens, args)
    return out


def text_of_token(cu_seqlens: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the text of each token and its position there, int32[T] both; S and 0 for padding."""
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    texts = num_at_most(cu_seqlens[1:], index)
    return texts, jnp.where(index < cu_seqlens[-1], index - cu_seqlens[texts], 0)


@registry.define(OP, "texts of many lengths in one row, each seen by itself")
def reference(q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array, args: AttentionArgs) -> jax.Array:
    """Computes blocks of queries of one text, in float32.

    Supports every shape, dtype and platform.
    """
    num_tokens, query_heads, dim = q.shape
    heads, group, num_texts = k.shape[0], query_heads // k.shape[0], len(cu_seqlens) - 1
    out = jnp.zeros((num_tokens, query_heads, v.shape[2]), q.dtype)
    if num_tokens == 0 or num_texts == 0:
        return out
    length = block_len(num_tokens, query_heads, num_tokens)
    texts, positions = text_of_token(cu_seqlens, num_tokens)
    until = padded(positions if args.sees_until is None else args.sees_until, length)
    keys, values = k.astype(jnp.float32), v.astype(jnp.float32)
    grouped = padded(q, length).reshape(-1, heads, group, dim).astype(jnp.float32)
    sinks = None
    if args.sinks is not None:
        of_heads = args.sinks.astype(jnp.float32).reshape(heads, 1, group)
        sinks = jnp.broadcast_to(of_heads, (heads, length, group)).reshape(heads, -1, 1)

    def one_block(text: jax.Array, begin: jax.Array, at: jax.Array) -> jax.Array:
        queries, last = (jax.lax.dynamic_slice_in_dim(x, begin, length) for x in (grouped, until))
        own = texts == text
        scores = jnp.einsum("thgd,hsd->htgs", queries, keys, precision=jax.lax.Precision.HIGHEST) * args.scale
        if args.softcap is not None:
            scores = args.softcap * jnp.tanh(scores / args.softcap)
        seen = own & (positions <= jnp.maximum(at, last)[:, None])
        if args.window is not None:
            seen &= positions > at[:, None] - args.window
        rows = scores.reshape(heads, length * group, num_tokens), jnp.repeat(seen, group, axis=0)
        found = softmax_times_values(*rows, values, own[:, None], sinks).reshape(heads, length, group, -1)
        return jnp.swapaxes(found, 0, 1).reshape(length, query_heads, -1).astype(q.dtype)

    return by_block(one_block, out, length, jnp.diff(cu_seqlens), cu_seqlens)


def _kernel_unsupported_reason(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array, args: AttentionArgs
) -> str | None:
    if not (q.size and k.size and v.size):
        return "there is nothing to compute"
    if k.dtype != v.dtype or k.dtype not in DTYPES:
        return f"keys are {k.dtype} and values {v.dtype}"
    return unsupported_reason(q)


registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)(kernels.varlen_attention)
