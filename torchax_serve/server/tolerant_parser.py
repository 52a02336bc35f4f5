"""transformers' parser of response templates, for texts that may not be as they expect."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from torchax_serve.sampling.thinking_budget import ReasoningMarkers
from torchax_serve.server.call_stream import (
    CallPiece,
    CallStream,
    DialectCalls,
    JsonCalls,
    KeyedCalls,
    TaggedCalls,
    Typed,
)
from torchax_serve.server.nested_calls import NestedCalls
from torchax_serve.server.python_call_list import add_parser
from torchax_serve.server.python_calls import PythonCalls
from torchax_serve.server.response_family import CALLS, INLINE, KEYED, REASONING

add_parser()

MAX_HELD_CHARS = 1 << 12
"""Characters of parsed text after which the parser's buffer is cut, so that time stays linear in the length."""
LOOK_BACK = 1 << 10
"""Characters that stay in it, for patterns that look back, and for text that is read once more."""
_PLAIN = r"(?:\\\W|[^\\()\[\]{}*+?|^$.])+"
_TAG = re.compile(
    rf"(?P<begin>{_PLAIN})\(\?P<key>.*\(\?P<value>\.\*\?\)(?:\\n\??|\(\?\(\w+\)[^()]*\))?(?P<closing>{_PLAIN})(?:\(\?=.*)?"
)
"""Pattern of an argument between two texts that stand for themselves."""
_NESTED = "(?P=key)"
"""Part of the pattern of an argument whose closing text has its name, which may have others in it."""
_UNMARKED = re.compile(r"[\s;,]*(?:```\w*\s*)?")
"""Beginning of a region that other text could begin with as well."""


class TolerantParser(ResponseParser):
    """transformers' parser, with text of regions that do not parse, and a bounded buffer.

    Regions with tool calls are read while they come: a closing text inside of an argument ends none, and text that can
    be no call is content from then on.

    Args:
        template: Of the family.
        markers: Texts around the reasoning.
        reads_calls: Whether there are tools, so that calls are read.
        schemas: Of the arguments of the functions, by name.
        **options: Of transformers' parser.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        markers: ReasoningMarkers | None = None,
        *,
        reads_calls: bool,
        schemas: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        fields: Mapping[str, Mapping[str, Any]] = template["fields"]
        self._openings = {name: field.get("open") for name, field in fields.items() if name in REASONING}
        if markers is not None:
            self._openings |= dict.fromkeys(self._openings, markers.opening)
        self._raw = self._closing = ""
        self._parts: list[str] = []
        self._reads_calls, self._schemas = reads_calls, schemas or {}
        self._stream: CallStream | None = None  # of the open region
        self._num_pushed, self._pieces, self._has_calls = 0, list[CallPiece](), False
        self._is_none = False  # whether the open region is no call
        self._is_marked = True  # whether a text of the format begins it
        super().__init__(dict(template), prefix="", **options)

    @property  # a text that grows by copying takes time by the square of its length
    def _body(self) -> str:
        return "".join(self._parts)

    @_body.setter
    def _body(self, text: str) -> None:
        self._parts = [text] if text else []

    @property
    def field(self) -> str | None:
        """Field of the text that comes now."""
        return self._current

    def answer_start(self, prompt: str) -> str:
        """Returns the part of the answer that the prompt has written already."""
        found: str = self._spec.truncate_past_last_anchor(prompt)
        if found != prompt:
            return found
        # Without an anchor: an opened reasoning at the end of the prompt is all that matters.
        for begin in self._openings.values():
            _, found, behind = prompt.rpartition(begin) if isinstance(begin, str) else ("", "", "")
            if found and not behind.strip():
                return found + behind
        return ""

    def cut(self) -> None:
        """Drops text that has been parsed; some stays, for patterns that look back."""
        if self._pos > MAX_HELD_CHARS:
            self._buffer, self._pos = self._buffer[self._pos - LOOK_BACK :], LOOK_BACK
            if self._current is None or self._spec.fields[self._current].content == "text":
                self._body = ""

    def end(self) -> list[dict[str, Any]]:
        """Closes all regions; returns the last events."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _scan(self, watch: Any, eos: bool) -> tuple[Any, int]:
        """Returns the next match of a pattern, and where text begins that has to wait."""
        if self._stream is None:
            best, hold = super()._scan(watch, eos)
            self._closing = best[2].group(0) if best is not None and best[0] == "close" else ""
            return best, hold
        assert self._current is not None
        field, begin, fed = self._spec.fields[self._current], self._pos, self._pos
        self._closing = ""
        while True:
            match = None if field.close_re is None else field.close_re.search(self._buffer, begin, partial=not eos)
            until = len(self._buffer) if match is None else match.start()
            self._push(self._buffer[fed:until])
            if (end := self._end_of_region(field)) is not None:
                end = until - self._num_pushed + end
                self._go_back(end)
                return ("close", field, _RegionEnd(end)), end
            if match is None:
                return None, until
            fed, is_inside = until, self._stream.is_inside
            if not is_inside and not eos and (match.partial or self._can_grow("close", field, match)):
                return None, until
            if not is_inside:
                self._closing = match.group(0)
                return ("close", field, match), until
            if (begin := until + 1) > len(self._buffer):
                return None, len(self._buffer)

    def _push(self, text: str) -> None:
        assert self._stream is not None
        self._num_pushed += len(text)
        pieces = self._stream.push(text) if text else []
        self._pieces += pieces
        self._has_calls = self._has_calls or bool(pieces)

    def _end_of_region(self, field: Any) -> int | None:
        """Returns the region's length where it ends without a closing text; None where it does not."""
        assert self._stream is not None
        if self._stream.end is None:
            return None
        is_read = self._has_calls or (isinstance(self._stream, JsonCalls) and self._stream.is_complete)
        self._is_none = not is_read
        return self._stream.end if field.close_re is None or not is_read else None

    def _go_back(self, place: int) -> None:
        """Takes text of the region behind a place of the buffer back, to be read once more."""
        if place < self._pos:
            body = self._body
            self._body = body[: len(body) - (self._pos - place)]
            self._pos = place

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        before, self._parts = self._parts, []
        super()._accumulate(events, text)
        before += self._parts
        self._parts = before
        if self._pieces and events:
            events[-1]["pieces"], self._pieces = self._pieces, []

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._raw, self._is_none = m.group(0), False
        self._is_marked = _UNMARKED.fullmatch(self._raw) is None
        self._num_pushed, self._pieces, self._has_calls = 0, [], False
        is_call = self._reads_calls and field.name.startswith(CALLS)
        self._stream = self._call_stream(field, self._captures) if is_call else None

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, stream = self._current, self._stream
        is_explicit = field is not None and field != self._implicit_name
        raw = self._raw + self._body + self._closing if is_explicit else ""
        found: dict[str, Any] = {"raw": raw, "is_marked": self._is_marked}
        if stream is not None:
            found["pieces"] = [*self._pieces, *([] if self._is_none else stream.close())]
            if self._closing and not self._has_calls and not found["pieces"] and isinstance(stream, JsonCalls):
                found["pieces"] = stream.without_arguments()
            self._has_calls = self._has_calls or bool(found["pieces"])
            is_dropped = self._is_over_at_rest(field) or self._may_be_closing(field, stream.rest)
            found |= {"has_calls": self._has_calls, "rest": "" if is_dropped else stream.rest}
        self._stream, self._pieces = None, []
        num_before = len(events)
        try:
            if self._is_none:
                raise ValueError("no call")
            super()._close_current(events)
        except Exception:  # content parsers raise whatever they like for an answer that is not as they expect
            del events[num_before:]
            events.append({"type": "region_error", "field": field})
            self._reset_to_implicit()
        self._is_none, self._closing = False, ""
        for event in events[num_before:]:
            event.update(found)
        self._output.clear()  # events have all of it

    def _may_be_closing(self, field: str | None, rest: str) -> bool:
        """Returns whether text behind the arguments begins the closing text of a cut answer."""
        closing = None if field is None else self._spec.fields[field].close_re
        rest = rest.strip()  # line breaks in front belong to the JSON text
        return closing is not None and any(closing.fullmatch(each, partial=True) for each in (rest, f"\n{rest}"))

    def _is_over_at_rest(self, field: str | None) -> bool:
        """Returns whether the region has ended in front of text that is no call."""
        return field is not None and self._spec.fields[field].close_re is None

    def _call_stream(self, field: Any, captures: Mapping[str, str]) -> CallStream | None:
        """Returns a reader of a region of tool calls; None if its text has an unknown form."""
        name = captures.get("name")
        function = field.transform.get("function") if isinstance(field.transform, dict) else None
        is_behind = function == {"name": "{name}", "arguments": "{content}"} and name
        if field.content == "json" and field.transform == KEYED:
            return KeyedCalls()
        if field.content == "json" and not field.content_args:
            is_inside = function == "{content}" or field.transform_each
            is_inside = is_inside or (isinstance(function, dict) and function.get("name") == "{content.name}")
            if not (is_behind or is_inside):
                return None
            names = self._tool_params if field.name == INLINE else None
            return JsonCalls(name, captures.get("id"), is_marked=self._is_marked, names=names)
        if field.content == "json" and is_behind and (delimiter := _delimiter(field.content_args)):
            return DialectCalls(str(name), delimiter)
        if field.content == "python-call-list" and self._is_marked:
            return PythonCalls()
        if field.content == "xml-inline" and is_behind and set(field.content_args) == {"tag_pattern"}:
            return self._tag_stream(str(name), field.content_args["tag_pattern"])
        return None

    def _tag_stream(self, name: str, pattern: str) -> CallStream | None:
        """Returns a reader of arguments in tags; None if their pattern has an unknown form."""
        begin, is_nested, _ = pattern.partition("(?P<key>")
        if is_nested and _NESTED in pattern:
            return NestedCalls(name, _plain(begin).removesuffix("<"), self._schemas.get(name))
        tag = _TAG.fullmatch(pattern)
        return tag and TaggedCalls(name, pattern, _plain(tag["begin"]), _plain(tag["closing"]), self._typed(name))

    def _typed(self, name: str) -> Typed:
        """Returns what gives arguments of a function the types of its schema."""

        def typed(key: str, text: str, kind: str | None) -> Any:
            types = _types_of((self._tool_params.get(name) or {}).get(key))
            if kind is not None and (not types or "string" in types):
                return text if kind in ("string", "true") else _of_json(text)
            call = {"function": {"name": name, "arguments": {key: text}}}
            found = self._coerce_tool_calls(call)["function"]["arguments"][key]
            return _of_python(_exact(found, text) if "number" in types else found, types)

        return typed


class _RegionEnd:
    """Stands for an empty match at a place of the buffer."""

    def __init__(self, place: int) -> None:
        self._place = place

    def start(self) -> int:
        """Returns the place."""
        return self._place

    def end(self) -> int:
        """Returns the place."""
        return self._place

    def groupdict(self) -> dict[str, str]:
        """Returns no groups."""
        return {}


def _plain(pattern: str) -> str:
    """Returns the text of a pattern that stands for itself."""
    return re.sub(r"\\(\W)", r"\1", pattern)


def _of_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _exact(value: Any, text: str) -> Any:
    """Returns a number as it is written; transformers has rounded it to float64, or read none."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value == text):
        return value
    found = _of_json(text)
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) else value


def _types_of(schema: Any) -> Sequence[str]:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    return [kinds] if isinstance(kinds, str) else kinds or ()


def _of_python(value: Any, types: Sequence[str]) -> Any:
    """Returns a list or an object that is written as Python writes it; others unchanged."""
    if not isinstance(value, str) or "string" in types or not {"array", "object"} & set(types):
        return value
    try:
        found = ast.literal_eval(value.strip())
        json.dumps(found, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return value
    kind = "array" if isinstance(found, list) else "object" if isinstance(found, dict) else ""
    return found if kind in types else value


def _delimiter(args: Mapping[str, Any]) -> str | None:
    """Returns the text around strings of JSON with bare keys; None for another dialect."""
    delimiters = args.get("string_delims")
    is_known = set(args) == {"string_delims", "unquoted_keys"} and args["unquoted_keys"] and len(delimiters or ()) == 1
    if not is_known or delimiters is None or delimiters[0][0] != delimiters[0][1]:
        return None
    found: str = delimiters[0][0]
    return found
