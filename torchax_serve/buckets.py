"""Ladders of lengths: every prompt and every cache is padded to a rung, so that few shapes are ever compiled.

Rungs are powers of two, and from 128 on the half-way points between them: padding costs little where it is much work.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_adapters.errors import InvalidArgumentError

SMALLEST = 32
HALF_WAY_FROM = 128


def next_bucket(length: int, limit: int | None = None) -> int:
    """The smallest rung that holds `length`, never above `limit`.

    Raises:
        InvalidArgumentError: `length` is above `limit`.
    """
    if limit is not None and length > limit:
        raise InvalidArgumentError(f"expected at most {limit} tokens, got {length}; shorten the prompt")
    rung = SMALLEST
    while rung < length:
        is_power = rung & (rung - 1) == 0
        rung = rung * 4 // 3 if not is_power else rung * 3 // 2 if rung >= HALF_WAY_FROM else rung * 2
    return rung if limit is None else min(rung, limit)


def bucket_sizes(largest: int, growth: int = 2, smallest: int = 1) -> tuple[int, ...]:
    """`smallest` times powers of `growth` below `largest`, and `largest`."""
    rungs = []
    while smallest < largest:
        rungs.append(smallest)
        smallest *= growth
    return (*rungs, largest)


def bucket_for(rungs: Sequence[int], size: int) -> int:
    """The first of `rungs` that holds `size`."""
    return next(r for r in rungs if r >= size)


def token_buckets(token_budget: int) -> tuple[int, ...]:
    """What a step of up to `token_budget` tokens is padded to."""
    top = next_bucket(token_budget)
    return tuple(sorted({min(next_bucket(size), top) for size in range(1, token_budget + 1)}))
