"""Tool calls of an answer as far as they are certain: names and pieces of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torchax_serve.server.json_scanner import JsonScanner

_WORD = re.compile(r"\w+")
ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys of the arguments in an object that is a call."""


class CallPiece(NamedTuple):
    """A piece of a call.

    Attributes:
        name: Name of the function in the call's first piece; None in later ones.
        text: Piece of the JSON text of the arguments.
        is_last: Whether the arguments are complete with it.
    """

    name: str | None
    text: str
    is_last: bool = False


class CallStream(Protocol):
    """Reader of a region with calls."""

    def push(self, text: str) -> list[CallPiece]:
        """Returns what a piece of the region makes certain."""

    def close(self) -> list[CallPiece]:
        """Returns the rest at the end of the region."""

    @property
    def rest(self) -> str:
        """Text that is part of no call; at the end of the region."""


class JsonCalls:
    """Calls whose arguments are JSON.

    It is an object behind the name, or an object (or a list of them) with the name in it.

    A call begins with the first key of its arguments, or with their end: what does not get so far is none.

    Args:
        name: Name of the function, where it stands in front of the JSON text; None where it stands in it.
    """

    def __init__(self, name: str | None) -> None:
        self._scanner = JsonScanner()
        self._given, self._name = name, name
        self._level = None if name is None else 0  # brackets around the arguments
        self._key = ""  # of the call, at its level
        self._held: list[str] | None = None  # of arguments that have begun
        self._has_key = self._is_complete = self._has_begun = False

    @property
    def rest(self) -> str:
        """Text that is no JSON, if a call has been read."""
        return self._scanner.rest or ""

    def push(self, text: str) -> list[CallPiece]:
        """Returns what a piece of the region makes certain."""
        found: list[CallPiece] = []
        for piece in self._scanner.scan(text):
            depth = len(self._scanner.stack)
            if piece.kind == "open" and self._level is None:
                self._level = 1 if piece.text == "{" else 2
            level = self._level or 0
            if self._held is None or self._is_complete:
                self._outside(piece.kind, piece.text, piece.value, depth, level)
            else:
                self._held.append(piece.text)
                self._has_key = self._has_key or piece.kind == "key"
                self._is_complete = piece.kind == "close" and depth == level
            self._emit(found)
            if piece.kind == "close" and depth == level - 1:
                self._next_call()
        return _merged(found)

    def close(self) -> list[CallPiece]:
        """Returns nothing: what is not complete by now stays incomplete."""
        return []

    def _outside(self, kind: str, text: str, value: str, depth: int, level: int) -> None:
        """Takes a piece that is not in the arguments."""
        if kind == "key" and depth == level:
            self._key = value
        elif kind == "string" and depth == level and self._key == "name" and value:
            self._name = self._name or value
        elif kind == "open" and text == "{" and depth == level + 1 and self._held is None:
            is_call = level == 0 or (self._scanner.stack[level - 1] == "{" and self._key in ARGUMENT_KEYS)
            self._held = [text] if is_call else None

    def _emit(self, found: list[CallPiece]) -> None:
        is_ready = self._has_key or self._is_complete
        if self._name is None or not self._held or not is_ready:
            return
        found.append(CallPiece(None if self._has_begun else self._name, "".join(self._held), self._is_complete))
        self._held, self._has_begun = [], True

    def _next_call(self) -> None:
        self._name, self._key, self._held = self._given, "", None
        self._has_key = self._is_complete = self._has_begun = False


class DialectCalls(JsonCalls):
    """A call whose arguments are JSON with bare keys, as Gemma 4 writes them.

    Strings stand between delimiters of their own.

    Args:
        name: Name of the function.
        delimiter: Text around a string.
    """

    def __init__(self, name: str, delimiter: str) -> None:
        super().__init__(name)
        self._delimiter, self._buffer, self._in_string, self._may_be_key = delimiter, "", False, False

    def push(self, text: str) -> list[CallPiece]:
        """Returns what a piece of the region makes certain."""
        return super().push("".join(self._translated(text)))

    def close(self) -> list[CallPiece]:
        """Returns what the end makes certain."""
        rest, self._buffer = self._buffer, ""
        return super().push(rest)

    def _translated(self, text: str) -> Iterator[str]:
        """Yields JSON."""
        buffer, begin = self._buffer + text, 0
        self._buffer = ""
        while begin < len(buffer):
            if buffer.startswith(self._delimiter, begin):
                self._in_string = not self._in_string
                begin += len(self._delimiter)
                yield '"'
            elif self._delimiter.startswith(buffer[begin:]):
                break
            elif self._in_string:
                end = buffer.find(self._delimiter[0], begin + 1)
                end = len(buffer) if end < 0 else end
                yield json.dumps(buffer[begin:end], ensure_ascii=False)[1:-1]
                begin = end
            else:
                word = _WORD.match(buffer, begin)
                if word is not None and self._may_be_key:
                    if word.end() == len(buffer):
                        break
                    yield f'"{word[0]}"' if buffer[word.end()] == ":" else word[0]
                else:
                    yield buffer[begin] if word is None else word[0]
                if word is not None or not buffer[begin].isspace():
                    self._may_be_key = word is None and buffer[begin] in "{,"
                begin = begin + 1 if word is None else word.end()
        self._buffer = buffer[begin:]


class TaggedCalls:
    """A call whose arguments are tags, each a piece of the JSON text as soon as it is complete.

    Args:
        name: Name of the function.
        pattern: Of a tag, with the groups ``key`` and ``value``.
        closing: Text that ends a tag.
        typed: Returns an argument with the type that the function's schema has for it.
    """

    def __init__(
        self, name: str, pattern: str, closing: str, typed: Callable[[Mapping[str, str]], Mapping[str, Any]]
    ) -> None:
        self._name, self._pattern, self._closing, self._typed = name, re.compile(pattern, re.DOTALL), closing, typed
        self._parts, self._end = [""], ""  # text behind the last tag; its end, which may begin what closes one
        self._keys: set[str] = set()
        self.rest = ""

    def push(self, text: str) -> list[CallPiece]:
        """Returns what a piece of the region makes certain."""
        self._parts.append(text)
        self._end = self._end[-len(self._closing) + 1 :] + text
        found: list[CallPiece] = []
        if self._closing in self._end:
            body, end = "".join(self._parts), 0
            begin = max(0, len(body) - len(self._end))
            while (closed := body.find(self._closing, begin)) >= 0:
                tag = self._pattern.search(body, end, closed + len(self._closing))
                begin = end = closed + len(self._closing)
                if tag is not None and tag["key"] not in self._keys:
                    found.append(self._piece(tag["key"], tag["value"]))
            self._parts, self._end = [body[end:]], body[end:]
        return _merged(found)

    def _piece(self, key: str, value: str) -> CallPiece:
        typed = self._typed({key: value})[key]
        try:
            text = json.dumps(typed, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            text = json.dumps(value, ensure_ascii=False)
        lead = ", " if self._keys else "{"
        name = None if self._keys else self._name
        self._keys.add(key)
        return CallPiece(name, f"{lead}{json.dumps(key, ensure_ascii=False)}: {text}")

    def close(self) -> list[CallPiece]:
        """Returns the end of the arguments, if there were any."""
        return [CallPiece(None, "}", is_last=True)] if self._keys else []


def _merged(pieces: list[CallPiece]) -> list[CallPiece]:
    """Returns the pieces with those of one call in one."""
    found: list[CallPiece] = []
    for piece in pieces:
        if found and piece.name is None and not found[-1].is_last:
            found[-1] = CallPiece(found[-1].name, found[-1].text + piece.text, piece.is_last)
        else:
            found.append(piece)
    return found
