"""Reads a JSON text that comes in pieces, and says at each piece what of it is certain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

MAX_DEPTH = 256
"""Most objects and arrays around a value; clients' parsers fail beyond some hundreds."""
_SPACES = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.\w]+")
_VALUE = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_MAX_SCALAR = 512  # characters of a number

Kind = Literal["open", "close", "key", "string", "text"]


class JsonPiece(NamedTuple):
    """A piece of a JSON text.

    Attributes:
        kind: ``open`` and ``close`` of an object or array, end of a ``key``, end of a ``string`` value, or other text.
        text: Its characters; control characters in strings, which models write, are escaped.
        value: Of a key or a string; empty for others.
    """

    kind: Kind
    text: str
    value: str = ""


class JsonScanner:
    """Reads one JSON object or array, cut anywhere.

    The pieces' joined texts do not depend on the cuts.

    Attributes:
        stack: Brackets that are open.
        rest: Text from the first character on that is no JSON, or that is behind the end; None before it.
        num_read: Characters of the text that are JSON.
    """

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.num_read = 0
        self.rest: str | None = None
        self._expected = "value"
        self._buffer = ""  # of what may become a number, an escape ...
        self._string: list[str] | None = None  # of the string that is open
        self._is_key = False

    def scan(self, text: str) -> Iterator[JsonPiece]:
        """Yields the pieces that `text` makes certain."""
        if self.rest is not None:
            self.rest += text
            return
        buffer, begin = self._buffer + text, 0
        self._buffer = ""
        while begin < len(buffer):
            found = self._next(buffer, begin)
            if found is None:
                self._buffer = buffer[begin:]
                return
            end, piece = found
            if end == begin:
                self.rest = buffer[begin:]
                return
            self.num_read += end - begin
            begin = end
            yield piece

    @property
    def in_string(self) -> bool:
        """Whether a string is open."""
        return self._string is not None and self.rest is None

    @property
    def is_complete(self) -> bool:
        """Whether the object or array has ended."""
        return self._expected == "end"

    def _next(self, buffer: str, begin: int) -> tuple[int, JsonPiece] | None:
        """Returns the piece at `begin` and its end, `begin` itself if it is no JSON.

        None if more is needed.
        """
        if self._string is not None:
            return self._in_string(buffer, begin)
        if (spaces := _SPACES.match(buffer, begin)) is not None:
            return spaces.end(), JsonPiece("text", spaces[0])
        char, invalid = buffer[begin], (begin, JsonPiece("text", ""))
        if self._expected == "end":
            return invalid
        if char == '"' and self._expected in ("value", "value or end", "key", "key or end"):
            self._string, self._is_key = [], self._expected.startswith("key")
            return begin + 1, JsonPiece("text", char)
        if char in "}]" and self._may_close(char):
            self.stack.pop()
            self._after_value()
            return begin + 1, JsonPiece("close", char)
        if char in ":," and self._expected == {":": "colon", ",": "comma or end"}[char]:
            in_object = self.stack[-1] == "{"
            self._expected = "key" if char == "," and in_object else "value"
            return begin + 1, JsonPiece("text", char)
        if not self._expected.startswith("value"):
            return invalid
        if char in "{[":
            if len(self.stack) >= MAX_DEPTH:
                return invalid
            self.stack.append(char)
            self._expected = "key or end" if char == "{" else "value or end"
            return begin + 1, JsonPiece("open", char)
        return self._scalar(buffer, begin) if self.stack else invalid

    def _may_close(self, char: str) -> bool:
        is_own = bool(self.stack) and self.stack[-1] == {"}": "{", "]": "["}[char]
        return is_own and self._expected.endswith("end")

    def _scalar(self, buffer: str, begin: int) -> tuple[int, JsonPiece] | None:
        found = _SCALAR.match(buffer, begin)
        if found is None or len(found[0]) > _MAX_SCALAR:
            return begin, JsonPiece("text", "")
        if found.end() == len(buffer):
            return None
        if _VALUE.fullmatch(found[0]) is None:
            return begin, JsonPiece("text", "")
        self._after_value()
        return found.end(), JsonPiece("text", found[0])

    def _in_string(self, buffer: str, begin: int) -> tuple[int, JsonPiece] | None:
        assert self._string is not None
        if (plain := _PLAIN.match(buffer, begin)) is not None:
            self._string.append(plain[0])
            return plain.end(), JsonPiece("text", plain[0])
        char = buffer[begin]
        if char == '"':
            value, self._string = json.loads(f'"{"".join(self._string)}"'), None
            if self._is_key:
                self._expected = "colon"
                return begin + 1, JsonPiece("key", char, value)
            self._after_value()
            return begin + 1, JsonPiece("string", char, value)
        if char == "\\":
            if (escape := _ESCAPE.match(buffer, begin)) is None:
                begun = _BEGUN_ESCAPE.match(buffer, begin)
                return None if begun is not None and begun.end() == len(buffer) else (begin, JsonPiece("text", ""))
            text, end = escape[0], escape.end()
        else:
            text, end = json.dumps(char)[1:-1], begin + 1
        self._string.append(text)
        return end, JsonPiece("text", text)

    def _after_value(self) -> None:
        self._expected = "comma or end" if self.stack else "end"
