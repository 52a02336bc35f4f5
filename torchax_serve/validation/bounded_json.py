"""Parser for untrusted JSON, bounded in size and nesting.

It refuses values that JSON does not have. This module imports neither jax nor torch.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_DEPTH = 32
"""Most levels of nested objects and arrays; later recursive code must not exhaust the stack."""


def parse_json(content: bytes, *, max_bytes: int, max_depth: int = MAX_DEPTH) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Raises:
        ValueError: invalid JSON, or it is longer or deeper than allowed, repeats a key of an object, or has ``NaN``,
            ``Infinity`` or a number beyond float64; the message is one short line.
    """
    if len(content) > max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes of JSON, got {len(content)}")
    try:
        text = content.decode()
        value = json.loads(text, parse_constant=_no_constant, parse_float=_number, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"expected JSON in UTF-8, got a byte that is not at place {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON, got something else at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError(f"expected JSON of at most {max_depth} levels, got more") from error
    _check_depth(value, max_depth)
    return value


def _check_depth(value: Any, max_depth: int) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(max_depth):
        inner = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(f"expected JSON of at most {max_depth} levels, got more")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"expected numbers of JSON, got {name}")


def _number(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"expected numbers of at most 1.8e308, got {text[:20]}")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"expected each key once, got {twice[:40]!r} twice")
    return found
