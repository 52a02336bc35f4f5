"""Arguments of calls as values that every JSON writer takes, whatever the model wrote."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

UNREADABLE = "arguments"
"""Name under which arguments that are no object are shown, those that are no JSON as text."""
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.S
)
_HALF = re.compile("[\ud800-\udfff]")
_HALF_LEN = len("\\ud800")


def unicode_text(text: str) -> str:
    """Returns a text that UTF-8 has bytes for: halves of surrogate pairs are replaced."""
    return _HALF.sub("\ufffd", text)


def input_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call, as a value that is JSON.

    Of one that was cut it is what is complete, as clients read a stream. Numbers that JSON has not are text, and so
    are arguments that cannot be read. The text of an object is that object; other arguments have a name.
    """
    found = _value_of(text)
    if isinstance(found, str) and isinstance(inner := _value_of(found), dict) and UNREADABLE not in inner:
        return inner
    return found if isinstance(found, dict) else {} if found is None else {UNREADABLE: found}


def _value_of(text: str) -> Any:
    """Returns the value of a JSON text; an object with the text where it cannot be read."""
    if not text:
        return None
    try:
        found = _finite(_read(_ESCAPE.sub(_unicode_escape, unicode_text(text))))
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # also of numbers with thousands of digits
        return {UNREADABLE: unicode_text(text)}
    return found


def _read(text: str) -> Any:
    try:
        return from_json(text, allow_partial=True)
    except ValueError:  # of lists in each other, of which this parser takes fewer
        return json.loads(text)


def _unicode_escape(found: re.Match[str]) -> str:
    """Returns an escape, in place of half of a surrogate pair another character."""
    is_half = len(found[0]) == _HALF_LEN and found[0][1] == "u"
    return "\\ufffd" if is_half else found[0]


def _finite(value: Any) -> Any:
    """Returns a value with texts in place of numbers that JSON has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value
