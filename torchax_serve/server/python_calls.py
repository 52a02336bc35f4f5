"""Tool calls that models write as calls of Python functions with named arguments."""

from __future__ import annotations

import json
import re
import uuid

from torchax_serve.server.call_stream import CallPiece

_BETWEEN = "[], \t\r\n"
_BEHIND_STRING = ",)]}:"
_ESCAPES = "\\'\"/bfnrtu"
_OF_CHARACTERS = {"\n": "\\n", "\r": "\\r"}
_OPENING, _CLOSING = "([{", ")]}"
_LONG_INTEGERS = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?<![\w.+-])(?P<integer>-?[1-9]\d{15,})(?![\w.])""", re.DOTALL
)
"""Strings, and integers of 16 digits or more outside of them."""


class PythonCalls:
    """Calls such as ``[weather(city="Rome"), clock()]``, each read when it is complete.

    Calls may stand in a list, or one behind the other. Models write strings that Python does not take: with line
    breaks, with quotes that do not end them (a quote ends a string in front of a comma, a colon or a bracket), and with
    backslashes that begin no escape. Values are those of transformers' ``python-call-list``.
    """

    end: int | None = None

    def __init__(self) -> None:
        self._call: list[str] = []  # of the call that is open, as transformers' parser takes it
        self._raw: list[str] = []  # as it was written
        self._others: list[str] = []  # text that is part of no call
        self._quote, self._depth = "", 0
        self._is_escape = self._may_end = False  # behind a backslash; behind a quote that may end the string
        self._spaces = ""  # behind such a quote

    @property
    def rest(self) -> str:
        """Text that is part of no call."""
        return "".join([*self._others, *self._raw])

    @property
    def is_inside(self) -> bool:
        """Whether the text is in a string."""
        return bool(self._quote) and not self._may_end

    def push(self, text: str) -> list[CallPiece]:
        """Returns the calls that a piece of the region completes."""
        found: list[CallPiece] = []
        for char in text:
            self._take(char)
            if self._depth < 0:
                found += self._complete()
        return found

    def close(self) -> list[CallPiece]:
        """Returns nothing: what is not complete by now stays incomplete."""
        return []

    def _take(self, char: str) -> None:
        """Takes a character; behind the last one of a call the depth is below zero."""
        self._raw.append(char)
        if self._may_end and char.isspace():
            self._spaces += _OF_CHARACTERS.get(char, char)
            return
        if self._may_end:
            self._end_string(char)
        if self._quote:
            self._in_string(char)
        elif self._depth == 0:
            self._outside(char)
        else:
            self._quote = char if char in "\"'" else ""
            self._call.append(char)
            self._depth += (char in _OPENING) - (char in _CLOSING)
            self._depth = self._depth or -1

    def _end_string(self, char: str) -> None:
        """Ends the string in front of a character that can follow it; else its quote is text."""
        is_end = char in _BEHIND_STRING
        self._call.append(self._quote if is_end else f"\\{self._quote}{self._spaces}")
        self._quote, self._may_end, self._spaces = "" if is_end else self._quote, False, ""

    def _in_string(self, char: str) -> None:
        if self._is_escape:
            self._is_escape = False
            if char != "\n":  # which continues the line
                self._call.append(f"\\{char}" if char in _ESCAPES else f"\\\\{_OF_CHARACTERS.get(char, char)}")
        elif char == "\\":
            self._is_escape = True
        elif char == self._quote:
            self._may_end = True
        else:
            self._call.append(_OF_CHARACTERS.get(char, char))

    def _outside(self, char: str) -> None:
        """Takes a character of a name, or between calls."""
        if char == "(" and self._call:
            self._call.append(char)
            self._depth = 1
        elif char == "_" or char.isalnum() or (char in ".-" and self._call):
            self._call.append(char)
        else:
            self._others += self._raw[:-1] if self._call else []
            self._others += [] if char in _BETWEEN else [char]
            self._call, self._raw = [], []

    def _complete(self) -> list[CallPiece]:
        """Returns the call that has ended; one that is no call of named arguments is text."""
        text, raw = f"[{''.join(self._call)}]", self._raw
        self._call, self._raw, self._depth = [], [], 0
        try:
            name, arguments = _parsed(text)
        except (ValueError, RecursionError):
            self._others += raw
            return []
        return [CallPiece(name, arguments, is_last=True)]


def _parsed(text: str) -> tuple[str, str]:
    """Returns the name and the arguments, as JSON, of the call in a list of one."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    mark = uuid.uuid4().hex

    def marked(found: re.Match[str]) -> str:
        return f'"{mark}{found["integer"]}"' if found["integer"] else found[0]

    # transformers refuses integers above 2**53, which JSON has, too: its parser gets them as marked strings.
    (call,) = parse_content(_LONG_INTEGERS.sub(marked, text), "python-call-list", {})
    arguments = json.dumps(call["arguments"], ensure_ascii=False, allow_nan=False)
    return call["name"], re.sub(rf'"{mark}(-?\d+)"', r"\1", arguments)
