"""Tool calls of an answer as far as they are certain: names and pieces of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torchax_serve.server.json_scanner import JsonScanner

_WORD = re.compile(r"[\w.$@/-]+")
_BETWEEN_CALLS = " \t\r\n,;"
ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys of the arguments in an object that is a call."""
_NAME_KEYS = ("name", "function", "tool_name")
"""Keys of the name in such an object."""
_INNER_KEYS = ("function", "tool_calls", "tool_call")
"""Keys of an object with a call in it, or of a list of calls."""
_CALL_KEYS = frozenset({"id", "type", "index", "tool_call_id", "call_id", *_NAME_KEYS, *ARGUMENT_KEYS, *_INNER_KEYS})


class CallPiece(NamedTuple):
    """A piece of a call.

    Attributes:
        name: Name of the function in the call's first piece; None in later ones.
        text: Piece of the JSON text of the arguments.
        is_last: Whether the arguments are complete with it.
        id: Id that the model wrote; in a later piece, one that stands behind the arguments.
    """

    name: str | None
    text: str
    is_last: bool = False
    id: str | None = None


class CallStream(Protocol):
    """Reader of a region with calls."""

    def push(self, text: str) -> list[CallPiece]:
        """Returns what a piece of the region makes certain."""

    def close(self) -> list[CallPiece]:
        """Returns the rest at the end of the region."""

    @property
    def rest(self) -> str:
        """Text that is part of no call; at the end of the region."""

    @property
    def is_inside(self) -> bool:
        """Whether the text is in an argument, where no closing text ends the region."""

    @property
    def end(self) -> int | None:
        """Number of characters behind which there can be no call; None as long as there can."""


Typed = Callable[[str, str, str | None], Any]


def argument_piece(name: str | None, key: str, text: str) -> CallPiece:
    """Returns the piece of an argument that is complete.

    Args:
        name: Name of the function, for its first argument; None for a later one.
        key: Name of the argument.
        text: JSON text of its value.
    """
    return CallPiece(name, f"{', ' if name is None else '{'}{json.dumps(key, ensure_ascii=False)}: {text}")


def json_text(value: Any, written: str) -> str:
    """Returns the JSON text of a value that a model wrote.

    Args:
        value: The value as Python has it.
        written: Its text: of numbers beyond float64, such as ``1e999``, it is the JSON text; of what is no JSON,
            such as ``NaN``, it becomes a string.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return written.strip() if _is_json(written) else json.dumps(written, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """Returns whether a text is JSON as RFC 8259 has it, without ``NaN`` and ``Infinity``."""
    try:
        json.loads(text, parse_constant=int)  # an error, as no such name is an integer
    except (ValueError, RecursionError):
        return False
    return True


class JsonCalls:
    """Calls whose arguments are JSON.

    It is an object behind the name, or an object (or a list of them) with the name in it; further ones may follow.

    A call begins with the first key of its arguments, or with their end: what does not get so far is none.

    Args:
        name: Name of the function, where it stands in front of the JSON text; None where it stands in it.
        call_id: Id of the call, if one stands in front of it as well.
        is_marked: Whether a text of the format stands in front, behind which calls may have further keys.
        names: The only functions that are called; None: any.
    """

    def __init__(
        self,
        name: str | None,
        call_id: str | None = None,
        *,
        is_marked: bool = True,
        names: Collection[str] | None = None,
    ) -> None:
        self._is_marked, self._names = is_marked, names
        self._scanner, self._num_before = JsonScanner(), 0  # characters in front of the scanner's
        self._given, self._name = name, name
        self._given_id, self._id = call_id, call_id
        self._base = self._level = None if name is None else 0  # brackets around a call; around its arguments
        self._key = ""  # of the call, at its level
        self._held: list[str] | None = None  # of arguments that have begun
        self._has_key = self._is_complete = self._has_begun = self._is_none = False

    @property
    def rest(self) -> str:
        """Text that is no JSON, if a call has been read."""
        return (self._scanner.rest or "").lstrip(_BETWEEN_CALLS if self._given is None else "")

    @property
    def is_inside(self) -> bool:
        """Whether the text is in a string."""
        return self._scanner.in_string

    @property
    def is_complete(self) -> bool:
        """Whether the JSON text has ended."""
        return self._scanner.is_complete

    @property
    def end(self) -> int | None:
        """Number of characters up to the end of the JSON text, or to what shows that it is no call."""
        if self._is_none or self.rest:
            num_between = len(self._scanner.rest or "") - len(self.rest)
            return self._num_before + self._scanner.num_read + num_between
        return None

    def push(self, text: str) -> list[CallPiece]:
        """Returns what a piece of the region makes certain."""
        found: list[CallPiece] = []
        if not self._is_none:
            self._scan(text, found)
        while self._given is None and self._scanner.is_complete and self.rest.startswith(("{", "[")):
            following = self.rest
            self._num_before += self._scanner.num_read + len(self._scanner.rest or "") - len(following)
            self._scanner, self._base, self._level = JsonScanner(), None, None
            self._next_call()
            self._scan(following, found)
        return merged(found)

    def _scan(self, text: str, found: list[CallPiece]) -> None:
        for piece in self._scanner.scan(text):
            depth = len(self._scanner.stack)
            if piece.kind == "open" and self._base is None:
                self._base = self._level = 1 if piece.text == "{" else 2
            level = self._level or 0
            if self._held is None or self._is_complete:
                self._outside(piece.kind, piece.text, piece.value, depth, level, found)
            else:
                self._held.append(piece.text)
                self._has_key = self._has_key or piece.kind == "key"
                self._is_complete = piece.kind == "close" and depth == level
            self._emit(found)
            if piece.kind == "close" and depth == (self._level or 0) - 1:
                self._next_call()
            if self._is_none:
                return

    def close(self) -> list[CallPiece]:
        """Returns nothing: what is not complete by now stays incomplete."""
        return []

    def without_arguments(self) -> list[CallPiece]:
        """Returns the call whose name stands in front of no arguments; none if there is other text."""
        is_empty = self._given is not None and self._held is None and not (self.rest or self._scanner.stack)
        return [CallPiece(self._given, "{}", is_last=True, id=self._given_id)] if is_empty else []

    def _outside(self, kind: str, text: str, value: str, depth: int, level: int, found: list[CallPiece]) -> None:
        """Takes a piece that is not in the arguments."""
        if kind == "key" and depth == level:
            self._key = value
            self._is_none = not (self._is_marked or value in _CALL_KEYS or self._has_begun or self._held is not None)
        elif kind == "string" and depth == level and self._key in _NAME_KEYS and value:
            self._name = self._name or value
            self._is_none = self._names is not None and self._name not in self._names
        elif kind == "string" and depth == level and self._key in ("id", "tool_call_id", "call_id") and value:
            if self._has_begun:
                found.append(CallPiece(None, "", id=value))
            self._id = self._id or value
        elif (
            kind == "open"
            and depth > level
            and self._held is None
            and self._key in _INNER_KEYS
            and self._in_call(level)
        ):
            self._level = depth if text == "{" else depth + 1
            self._key = ""
        elif kind == "open" and text == "{" and depth == level + 1 and self._held is None:
            is_call = level == 0 or (self._in_call(level) and self._key in ARGUMENT_KEYS)
            self._held = [text] if is_call else None

    def _in_call(self, level: int) -> bool:
        return level > 0 and self._scanner.stack[level - 1 : level] == ["{"]

    def _emit(self, found: list[CallPiece]) -> None:
        is_ready = self._has_key or self._is_complete
        if self._name is None or not self._held or not is_ready:
            return
        first = (None, None) if self._has_begun else (self._name, self._id)
        found.append(CallPiece(first[0], "".join(self._held), self._is_complete, first[1]))
        self._held, self._has_begun = [], True

    def _next_call(self) -> None:
        self._name, self._id, self._key, self._held = self._given, self._given_id, "", None
        self._has_key = self._is_complete = self._has_begun = False
        stack = self._scanner.stack
        if self._level is not None and self._base is not None and len(stack) <= self._base:
            self._level = self._base


class KeyedCalls(JsonCalls):
    """Calls that are JSON objects whose key is the name, as Apertus writes them."""

    def __init__(self) -> None:
        super().__init__(None)

    def _outside(self, kind: str, text: str, value: str, depth: int, level: int, found: list[CallPiece]) -> None:
        """Takes a piece that is not in the arguments."""
        if kind == "key" and depth == level:
            if self._is_complete:  # another call in the same object
                self._next_call()
            self._name = value
        elif kind == "open" and text == "{" and depth == level + 1 and self._name:
            self._held = [text]


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

    @property
    def is_inside(self) -> bool:
        """Whether the text is in a string."""
        return self._in_string

    @property
    def end(self) -> int | None:
        """None: the opening text of a call stands for it."""
        return None

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

    A tag ends where another one, or the end of the region, follows: its value may have the text that ends it. One that
    is repeated is in the JSON text again: what has been sent cannot be taken back, and readers of JSON take the last.

    Args:
        name: Name of the function.
        pattern: Of a tag, with the groups ``key`` and ``value``, and perhaps ``kind``, a word for the value's type.
        begin, closing: Texts that begin and end a tag.
        typed: Returns an argument, by its name, text and kind, with the type that the function's schema has for it.
    """

    def __init__(
        self,
        name: str,
        pattern: str,
        begin: str,
        closing: str,
        typed: Typed,
    ) -> None:
        self._name, self._pattern, self._typed = name, re.compile(pattern, re.DOTALL), typed
        self._begin, self._closing = begin, closing
        self._boundary = re.compile(rf"{re.escape(closing)}(?=\s*{re.escape(begin)})")
        self._parts, self._tail = [""], ""  # text behind the last tag; its end, which may end a tag
        self._num_read = 0  # characters of tags
        self._has_arguments = False
        self._is_open = False  # whether the text has begun a tag
        self.end: int | None = None
        self.rest = ""

    @property
    def is_inside(self) -> bool:
        """Whether the text is in an argument's value."""
        behind = self._tail[len(self._closing) :]
        return self._is_open and not (self._tail.startswith(self._closing) and not behind.strip())

    def push(self, text: str) -> list[CallPiece]:
        """Returns what a piece of the region makes certain."""
        found: list[CallPiece] = []
        self._parts.append(text)
        self._tail += text
        self._open()
        while self._is_open and (boundary := self._boundary.search(self._tail)) is not None:
            body = "".join(self._parts)
            end = len(body) - len(self._tail) + boundary.end()
            found += self._tags(body[:end])
            self._num_read += end
            self._parts, self._tail = [body[end:]], body[end:]
            self._is_open = False
            self._open()
        begin = self._tail.rfind(self._closing)
        behind = self._tail[begin + len(self._closing) :].lstrip()
        if begin < 0 or not self._begin.startswith(behind):
            begin = max(0, len(self._tail) - len(self._closing) + 1)
        self._tail = self._tail[begin:]
        return merged(found)

    def _open(self) -> None:
        """Finds whether the text behind the last tag begins another one, or can begin none."""
        if self._is_open or self.end is not None:
            return
        body = "".join(self._parts)
        begun = body.lstrip()
        self._is_open = begun.startswith(self._begin)
        if begun and not self._is_open and not self._begin.startswith(begun):
            self.end = self._num_read + len(body) - len(begun)

    def _tags(self, text: str) -> list[CallPiece]:
        return [self._piece(tag.groupdict()) for tag in self._pattern.finditer(text)]

    def _piece(self, tag: Mapping[str, str]) -> CallPiece:
        key = tag["key"].replace("&quot;", '"') if self._begin.endswith('"') else tag["key"]
        found = self._typed(key, tag["value"], tag.get("kind"))
        name = None if self._has_arguments else self._name
        piece = argument_piece(name, key, json_text(found, tag["value"]))
        self._has_arguments = True
        return piece

    def close(self) -> list[CallPiece]:
        """Returns the last argument and the end of the arguments, if there were any and none is cut."""
        found = self._tags("".join(self._parts))
        if self._has_arguments and not self.is_inside:
            found.append(CallPiece(None, "}", is_last=True))
        return merged(found)


def merged(pieces: list[CallPiece]) -> list[CallPiece]:
    """Returns the pieces with those of one call in one."""
    found: list[CallPiece] = []
    for piece in pieces:
        if found and piece.name is None and piece.id is None and not found[-1].is_last:
            found[-1] = found[-1]._replace(text=found[-1].text + piece.text, is_last=piece.is_last)
        else:
            found.append(piece)
    return found
