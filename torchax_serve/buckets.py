"""Bucket sizes: prompts, caches and steps are padded to one of a few sizes.

So few shapes are compiled. Lengths of prompts and caches are powers of two, and from 128 on also the points half-way
between them, since padding costs more there. Steps of the engine have fewer sizes, where their padding is nearly free.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_adapters.errors import InvalidArgumentError

SMALLEST = 32  # tokens; shorter prompts cost the same
HALF_WAY_FROM = 128  # tokens, from which sizes half-way between powers of two exist


def next_bucket(length: int, limit: int | None = None) -> int:
    """Returns the smallest bucket size of at least `length`, and at most `limit`.

    Raises:
        InvalidArgumentError: `length` is above `limit`.
    """
    if limit is not None and length > limit:
        raise InvalidArgumentError(f"expected at most {limit} tokens, got {length}; shorten the prompt")
    bucket = SMALLEST
    while bucket < length:
        is_power = bucket & (bucket - 1) == 0
        bucket = bucket * 4 // 3 if not is_power else bucket * 3 // 2 if bucket >= HALF_WAY_FROM else bucket * 2
    return bucket if limit is None else min(bucket, limit)


def bucket_sizes(largest: int, growth: int = 2, smallest: int = 1) -> tuple[int, ...]:
    """Returns `smallest` times the powers of `growth` that are below `largest`, and `largest`."""
    buckets = []
    while smallest < largest:
        buckets.append(smallest)
        smallest *= growth
    return (*buckets, largest)


def bucket_for(buckets: Sequence[int], size: int) -> int:
    """Returns the first of `buckets`, which ascend, that is at least `size`."""
    return next(r for r in buckets if r >= size)


def token_buckets(token_budget: int, growth: int = 2, limit: int = 0) -> tuple[int, ...]:
    """Returns the bucket sizes of a step with up to `token_budget` tokens.

    Args:
        token_budget: Maximum number of tokens of a step.
        growth: Factor between sizes below `limit`.
        limit: Size from which all sizes of `next_bucket` exist.
    """
    top = next_bucket(token_budget)
    few = bucket_sizes(top, growth, SMALLEST)
    sizes = sorted({min(next_bucket(size), top) for size in range(1, token_budget + 1)})
    return tuple(size for size in sizes if size >= limit or size in few)
