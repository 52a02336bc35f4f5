"""Ladders of lengths: every prompt and every cache is padded to a rung, so that few shapes are ever compiled.

Rungs are powers of two and the half-way points between them, so padding costs at most a third.
"""

from __future__ import annotations

from model_adapters.errors import InvalidArgumentError

SMALLEST = 16


def bucket(length: int, limit: int | None = None) -> int:
    """The smallest rung that holds `length`, never above `limit`.

    Raises:
        InvalidArgumentError: `length` is above `limit`.
    """
    if limit is not None and length > limit:
        raise InvalidArgumentError(f"expected at most {limit} tokens, got {length}; shorten the prompt")
    rung = SMALLEST
    while rung < length:
        rung = rung * 3 // 2 if rung & (rung - 1) == 0 else rung * 4 // 3
    return rung if limit is None else min(rung, limit)
