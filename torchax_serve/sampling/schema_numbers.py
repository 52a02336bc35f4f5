"""Numbers of JSON schemas as grammars hold them.

llguidance reads them as float64, and ranges as int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from model_adapters.errors import InvalidArgumentError

EXACT = 1 << 53
"""Integers up to here are float64 numbers, all of them."""
LAST = (1 << 63) - 1
"""The last number of int64, which is the end of a range of integers that ends behind it."""
FARTHEST = (1 << 63) - 1024
"""The largest float64 number that is an int64 one."""
MOST_OPEN = 10**17
"""Ranges without another end begin at most here: llguidance makes none of further digits."""


def with_numbers_held(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema whose ranges of numbers are ones that grammars hold exactly.

    An end that is no float64 number, or is none of int64, moves to the next that is: all values of the range that is
    left are in that of the schema.

    Raises:
        InvalidArgumentError: A constant would be another number, or a range has none that grammars have.
    """
    for key in ("const", "enum"):
        for number in _integers(schema.get(key)):
            if abs(number) > EXACT and (abs(number) > LAST or int(float(number)) != number):
                raise InvalidArgumentError(
                    f"{key}: expected integers that are float64 numbers below 2**63, as grammars have them, got "
                    f"{number}; give it as a text"
                )
    found = dict(schema)
    for keys, sign in ((("minimum", "exclusiveMinimum"), -1), (("maximum", "exclusiveMaximum"), 1)):
        ends = {key: sign * found.pop(key) for key in keys if _is_number(found.get(key))}
        held = _upper_ends(ends, *keys, is_integer=schema.get("type") == "integer", last=LAST if sign > 0 else FARTHEST)
        found |= {key: sign * end for key, end in held.items()}
    lows, highs = (
        [found[key] for key in keys if _is_number(found.get(key))]
        for keys in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    )
    if lows and not highs and max(lows) > MOST_OPEN:
        found["maximum"] = FARTHEST
    if highs and not lows and min(highs) < -MOST_OPEN:
        found["minimum"] = -FARTHEST
    return found


def _upper_ends(
    ends: Mapping[str, float], inside: str, outside: str, *, is_integer: bool, last: int
) -> dict[str, float]:
    """Returns upper ends of a range as grammars have them, in it and outside of it.

    `last` is the one of a range of integers that goes further.
    """
    found: dict[str, float] = {}
    most = [_held(inside, ends[inside], last if is_integer else FARTHEST)] if inside in ends else []
    if outside in ends:
        end = ends[outside]
        if is_integer and isinstance(end, int):
            most.append(_held(outside, end - 1, last))
        elif (held := _held(outside, end, FARTHEST)) == end:
            found[outside] = end
        else:
            most.append(held)
    return {**found, inside: min(most)} if most else found


def _held(key: str, end: float, last: int) -> float:
    """Returns the upper end of a range, or the next lower one that grammars have."""
    if end <= -FARTHEST:
        raise InvalidArgumentError(f"{key}: expected a range with numbers within {FARTHEST} of zero, got none")
    if end >= FARTHEST:
        return last if end >= last else FARTHEST
    if isinstance(end, int) and abs(end) > EXACT and int(float(end)) != end:
        near = float(end)
        return int(near if near <= end else math.nextafter(near, -math.inf))
    return end


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integers(value: Any) -> Iterator[int]:
    """Yields the integers in a value of JSON."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _integers(part)
