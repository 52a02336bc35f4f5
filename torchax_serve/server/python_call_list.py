"""Reads lists of calls as Python writes them, where transformers does not.

``[get_weather(city="Paris")]`` becomes ``[{"name": "get_weather", "arguments": {"city": "Paris"}}]``.
The grammar is that of transformers' content parser ``python-call-list``, which came with its release 5.23.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS

NAME = "python-call-list"
MAX_DEPTH = 100
"""Most lists and objects around a value."""
MAX_INTEGER = 2**53 - 1
_TOKEN = re.compile(
    r"""[ \t\n\r]*(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:[-.][A-Za-z0-9_]+)*)
    |(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
    |(?P<quote>['"])(?P<string>(?:(?!(?P=quote))[^\\\n\r]|\\.)*)(?P=quote)
    |(?P<mark>[\[\](){},:=]))""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r'\\.|"', re.DOTALL)
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


class CallListReader:
    """Reads the tokens of a text."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0

    def calls(self) -> list[dict[str, Any]]:
        """Returns the calls, which are all of the text."""
        self._take("mark", "[")
        found = self._items("]", self._call)
        if self._text[self._place :].strip(" \t\n\r"):
            raise self._error("the end")
        return found

    def _error(self, expected: str) -> ValueError:
        return ValueError(f"{NAME}: expected {expected} at position {self._place} of {self._text[:200]!r}")

    def _next(self) -> re.Match[str] | None:
        return _TOKEN.match(self._text, self._place)

    def _take(self, kind: str, wanted: str | None = None) -> str:
        """Returns the next token, which has to be of a kind, or one text."""
        found = self._next()
        if found is None or found[kind] is None or wanted not in (None, found[kind]):
            raise self._error(wanted or f"a {kind}")
        self._place = found.end()
        return found[kind]

    def _is_next(self, mark: str) -> bool:
        found = self._next()
        return found is not None and found["mark"] == mark

    def _items(self, end: str, read: Callable[[], Any]) -> list[Any]:
        """Returns what stands between commas up to a closing mark."""
        found: list[Any] = []
        while not self._is_next(end) or found:
            found.append(read())
            if self._is_next(end):
                break
            self._take("mark", ",")
        self._take("mark", end)
        return found

    def _call(self) -> dict[str, Any]:
        name = self._take("name")
        self._take("mark", "(")
        return {"name": name, "arguments": self._unique(self._items(")", self._argument))}

    def _argument(self) -> tuple[str, Any]:
        name = self._take("name")
        self._take("mark", "=")
        return name, self._value(0)

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise self._error("names that differ in front of the end")
        return found

    def _pair(self, depth: int) -> tuple[str, Any]:
        key = self._string()
        self._take("mark", ":")
        return key, self._value(depth)

    def _string(self) -> str:
        body = self._take("string")
        # The escapes are those of JSON, whose strings stand between double quotes.
        shown = _ESCAPE.sub(lambda each: {"\\'": "'", '"': '\\"'}.get(each[0], each[0]), body)
        found: str = json.loads(f'"{shown}"', strict=False)
        found.encode()  # raises ValueError for half of a character
        return found

    def _value(self, depth: int) -> Any:
        found = self._next()
        if found is None:
            raise self._error("a value")
        if found["string"] is not None:
            return self._string()
        if found["number"] is not None:
            number = json.loads(self._take("number"))
            if math.isinf(number) or (isinstance(number, int) and abs(number) > MAX_INTEGER):
                raise self._error("a number that JSON's readers can hold in front of the end")
            return number
        if found["name"] in _CONSTANTS:
            return _CONSTANTS[self._take("name")]
        if found["mark"] not in ("[", "{") or depth >= MAX_DEPTH:
            raise self._error("a text, number, list, object, True, False or None, not too deep in others")
        self._place = found.end()
        if found["mark"] == "[":
            return self._items("]", lambda: self._value(depth + 1))
        return self._unique(self._items("}", lambda: self._pair(depth + 1)))


def calls_in(text: str, args: Any = None) -> list[dict[str, Any]]:
    """Returns the calls of a list, each with its name and arguments.

    Args:
        text: The list.
        args: Options of transformers' content parsers, of which this one has none.

    Raises:
        ValueError: It is no list of calls with named arguments.
    """
    return CallListReader(text).calls()


def add_parser() -> None:
    """Adds the parser to transformers' own, unless it is one of them."""
    CONTENT_PARSERS.setdefault(NAME, calls_in)
