"""Attention of many queries to dense keys and values, without a paged cache."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, spmd
from model_adapters.ops.attention_args import AttentionArgs, unsupported_field
from model_adapters.ops.cpu import attention as kernels
from model_adapters.ops.cpu.ffi import DTYPES, differentiated_as, unsupported_reason
from model_adapters.ops.linear import MAX_KERNEL_ROWS, batched_sums

OP = "dense_attention"
MAX_BLOCK = 256  # queries at a time; measured best on CPU among 128, 256 and all, from 512 queries on
MIN_BLOCK = 16  # queries at a time, however many keys there are
MAX_SCORES_BYTES = 64 << 20  # of one block of queries
SUPPORTED_ARGS = frozenset({"softcap", "sinks"})
"""Fields of `AttentionArgs` besides the scale that apply to dense keys and values.

All others are in the mask.
"""
NUM_CAUSAL_PARTS = 4  # each computes scores only with the keys before its end: 5/8 of the full square


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    args: AttentionArgs,
    *,
    causal: bool = False,
    return_weights: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns softmax attention with grouped heads, without repeating keys and values.

    A query that sees no key (a boolean mask all False, an additive one all ``-inf``) gives zeros, as
    ``torch.nn.functional.scaled_dot_product_attention`` does. An additive mask of ``finfo.min``, as transformers' eager
    attention uses it, makes the weights of such a row uniform, as in transformers.

    Args:
        q: Queries ``[B, Hq, T, D]``; query head ``i`` reads kv head ``i // (Hq // H)``.
        k: Keys ``[B, H, S, D]``.
        v: Values ``[B, H, S, Dv]``.
        mask: Boolean (True: may attend) or additive, of rank 4, broadcastable to ``[B, Hq, T, S]``; or None.
        args: Scale, soft cap (before the mask) and sinks. A window, ALiBi and a prefix are part of `mask` here.
        causal: Query ``i`` sees only keys ``j <= i`` of those that `mask` shows, both counted from 0 as in torch.
        return_weights: Return the attention weights as well.

    Returns:
        ``[B, Hq, T, Dv]`` in q's dtype, with scores, softmax and sums in float32; with `return_weights` also the
        weights ``[B, Hq, T, S]`` in q's dtype (a sink's share is left out).

    Raises:
        InvalidArgumentError: shapes that do not fit together, or a field of `args` that belongs into the mask.
    """
    _check(q, k, v, mask, args)
    result: jax.Array | tuple[jax.Array, jax.Array] = registry.call(
        OP, q, k, v, mask, args, causal=causal, return_weights=return_weights
    )
    return result


def _check(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, args: AttentionArgs) -> None:
    def expect(condition: bool, expected: str, got: Any) -> None:
        if not condition:
            raise InvalidArgumentError(f"dense_attention: expected {expected}, got {got}")

    shapes = f"q{list(q.shape)} k{list(k.shape)} v{list(v.shape)}"
    expect(q.ndim == k.ndim == v.ndim == 4, "q, k, v of rank 4", shapes)
    batch, num_heads, num_queries, dim = q.shape
    fits = k.shape[0] == v.shape[0] == batch and k.shape[3] == dim and v.shape[1:3] == k.shape[1:3]
    expect(fits, "q[B,Hq,T,D] k[B,H,S,D] v[B,H,S,Dv]", shapes)
    expect(k.shape[1] > 0 and num_heads % k.shape[1] == 0, "query heads a multiple of kv heads", shapes)
    if mask is not None:
        full = (batch, num_heads, num_queries, k.shape[2])
        expect(
            mask.ndim == 4 and all(m in (1, n) for m, n in zip(mask.shape, full, strict=True)),
            f"a mask that broadcasts to {list(full)}",
            list(mask.shape),
        )
    if args.sinks is not None:
        expect(args.sinks.shape == (num_heads,), f"sinks of shape [{num_heads}]", list(args.sinks.shape))
    expect(args.softcap is None or args.softcap > 0, "a positive softcap or None", args.softcap)
    reason = unsupported_field(args, SUPPORTED_ARGS)
    expect(reason is None, f"args with scale, {' and '.join(sorted(SUPPORTED_ARGS))}; all else in the mask", reason)


def _masked(scores: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Applies a mask ``[B|1, Hq|1, T|1, S|1]`` to scores ``[B, H, G, T, S]``."""
    if mask is None:
        return scores
    heads, group = scores.shape[1:3]
    shape = (heads, group) if mask.shape[1] > 1 else (1, 1)
    mask = mask.reshape(mask.shape[0], *shape, *mask.shape[2:])
    return jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask.astype(scores.dtype)


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Returns the float32 softmax of ``[B, H, G, T, S]``; rows of only -inf give zeros."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(scores.dtype).reshape(1, *scores.shape[1:3], 1, 1)
        top = jnp.maximum(top, sink)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    return weights / jnp.where(total == 0, 1.0, total)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    args: AttentionArgs,
    first_query: jax.Array | int,
    *,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns output and weights of queries that start at position `first_query`."""
    batch, num_heads, num_queries, dim = q.shape
    heads, num_keys = k.shape[1:3]
    group = num_heads // heads
    # The query heads of a group are more rows of one product with their kv head.
    rows = q.reshape(batch, heads, group * num_queries, dim)
    scores = (batched_sums(rows, k, is_input_major=False) * args.scale).reshape(
        batch, heads, group, num_queries, num_keys
    )
    if args.softcap is not None:
        scores = args.softcap * jnp.tanh(scores / args.softcap)
    scores = _masked(scores, mask)
    if causal:
        positions = first_query + jnp.arange(num_queries, dtype=jnp.int32)
        seen = jnp.arange(num_keys, dtype=jnp.int32) <= positions[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
    weights = _softmax(scores, args.sinks).astype(q.dtype)
    rows = weights.reshape(batch, heads, group * num_queries, num_keys)
    out = batched_sums(rows, v).astype(q.dtype)
    return out.reshape(batch, num_heads, num_queries, -1), weights.reshape(batch, num_heads, num_queries, num_keys)


@registry.define(OP, "many queries on dense keys and values")
def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    args: AttentionArgs,
    *,
    causal: bool,
    return_weights: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes all scores at once."""
    out, weights = _attend(q, k, v, mask, args, 0, causal=causal)
    return (out, weights) if return_weights else out


def _block_len(batch: int, num_heads: int, num_keys: int) -> int:
    """Returns how many queries to compute at a time, a power of two.

    Their scores are within ``MAX_SCORES_BYTES`` if possible.
    """
    block = MAX_BLOCK
    while block > MIN_BLOCK and batch * num_heads * block * num_keys * 4 > MAX_SCORES_BYTES:
        block //= 2
    return block


def _blocked_unsupported_reason(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    args: AttentionArgs,
    *,
    causal: bool,
    return_weights: bool,
) -> str | None:
    if return_weights:
        return "the weights are asked for, which needs all scores at once"
    if q.shape[2] <= _block_len(q.shape[0], q.shape[1], k.shape[2]):
        return f"{q.shape[2]} queries make one block"
    return None


@registry.register(OP, "blocked", registry.PLATFORMS, unsupported_reason=_blocked_unsupported_reason)
def blocked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    args: AttentionArgs,
    *,
    causal: bool,
    return_weights: bool,
) -> jax.Array:
    """Computes up to 256 queries at a time; causal parts skip later keys.

    That bounds the memory of scores.
    """
    batch, num_heads, num_queries, _ = q.shape
    block = _block_len(batch, num_heads, k.shape[2])
    num_blocks = -(-num_queries // block)
    padding = num_blocks * block - num_queries
    attend = partial(_attend, causal=causal)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    if mask is not None and mask.shape[2] > 1:
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, padding), (0, 0)))

    def queries(x: jax.Array, begin: jax.Array | int, count: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, begin, count, axis=2)

    def part(first: int, last: int) -> jax.Array:
        """Returns the attention of blocks `first` to `last`, computed one after the other."""
        num_keys = min(k.shape[2], last * block) if causal else k.shape[2]
        keys, values = k[:, :, :num_keys], v[:, :, :num_keys]
        seen = mask if mask is None or mask.shape[3] == 1 else mask[..., :num_keys]

        def one(begin: jax.Array | int) -> jax.Array:
            here = seen if seen is None or seen.shape[2] == 1 else queries(seen, begin, block)
            return attend(queries(q, begin, block), keys, values, here, args, begin)[0]

        if last - first == 1:
            return one(first * block)
        outs = jax.lax.map(one, jnp.arange(first, last, dtype=jnp.int32) * block)  # [blocks, B, Hq, block, Dv]
        return jnp.moveaxis(outs, 0, 2).reshape(batch, num_heads, -1, v.shape[3])

    num_parts = min(NUM_CAUSAL_PARTS, num_blocks) if causal else 1
    bounds = [i * num_blocks // num_parts for i in range(num_parts + 1)]
    parts = [part(first, last) for first, last in itertools.pairwise(bounds)]
    return jnp.concatenate(parts, axis=2)[:, :, :num_queries]


def _kernel_unsupported_reason(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    args: AttentionArgs,
    *,
    causal: bool,
    return_weights: bool,
) -> str | None:
    num_queries, num_keys = q.shape[2], k.shape[2]
    if return_weights:
        return "the weights are asked for, which needs all scores"
    if num_queries <= MAX_KERNEL_ROWS or not (q.size and k.size and v.size):
        return f"{num_queries} queries are few rows of products, which have a kernel"
    if causal and num_queries != num_keys:
        return f"{num_queries} queries and {num_keys} keys, of which each sees those up to its own"
    if k.dtype != v.dtype or k.dtype not in DTYPES:
        return f"keys are {k.dtype} and values {v.dtype}"
    return unsupported_reason(q)


@registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)
def in_caches(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    args: AttentionArgs,
    *,
    causal: bool,
    return_weights: bool,
) -> jax.Array:
    """Computes with the C++ kernel; what is differentiated is computed by XLA's products."""

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, sinks: jax.Array | None) -> jax.Array:
        return kernels.dense_attention(q, k, v, mask, dataclasses.replace(args, sinks=sinks), causal=causal)

    def products(
        q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, sinks: jax.Array | None
    ) -> jax.Array:
        given = (q, k, v, mask, dataclasses.replace(args, sinks=sinks))
        is_one_block = _blocked_unsupported_reason(*given, causal=causal, return_weights=False) is not None
        out = (reference if is_one_block else blocked)(*given, causal=causal, return_weights=False)
        assert isinstance(out, jax.Array)
        return out

    return differentiated_as(kernel, products)(q, k, v, mask, args.sinks)


spmd.shard_by_heads(OP, ("q", "k", "v", "mask"), divides_rows=True)
