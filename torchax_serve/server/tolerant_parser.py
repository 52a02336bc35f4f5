"""transformers' parser of response templates, for texts that may not be as they expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from torchax_serve.server.call_stream import CallStream, DialectCalls, JsonCalls, TaggedCalls
from torchax_serve.server.response_families import REASONING

MAX_HELD_CHARS = 1 << 12
"""Characters of parsed text after which the parser's buffer is cut, so that time stays linear in the length."""


class TolerantParser(ResponseParser):
    """transformers' parser, with text of regions that do not parse, and a bounded buffer."""

    _raw = ""
    _parts: list[str]

    @property  # a text that grows by copying takes time by the square of its length
    def _body(self) -> str:
        return "".join(self._parts)

    @_body.setter
    def _body(self, text: str) -> None:
        self._parts = [text] if text else []

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        before, self._parts = self._parts, []
        super()._accumulate(events, text)
        before += self._parts
        self._parts = before

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
        for name in REASONING:
            field = self._spec.fields.get(name)
            if field is None or field.open_re is None:
                continue
            opened = [match.end() for match in field.open_re.finditer(prompt)]
            closed = [match.end() for match in field.close_re.finditer(prompt)] if field.close_re else []
            if opened and not prompt[opened[-1] :].strip() and (not closed or closed[-1] < opened[-1]):
                match = list(field.open_re.finditer(prompt))[-1]
                return prompt[match.start() :]
        return ""

    def call_stream(self, opening: Mapping[str, Any], tags: tuple[str, str, str] | None) -> CallStream | None:
        """Returns a reader of a region of tool calls; None if its text has an unknown form.

        Args:
            opening: Event of the region's beginning.
            tags: Texts of `CallForm.argument`.
        """
        field, name = self._spec.fields[opening["field"]], opening.get("name")
        function = field.transform.get("function") if isinstance(field.transform, dict) else None
        is_behind = function == {"name": "{name}", "arguments": "{content}"} and name
        if field.content == "json" and not field.content_args:
            is_inside = function == "{content}" or field.transform_each
            is_inside = is_inside or (isinstance(function, dict) and function.get("name") == "{content.name}")
            return JsonCalls(name) if is_behind or is_inside else None
        if field.content == "json" and is_behind and (delimiter := _delimiter(field.content_args)):
            return DialectCalls(str(name), delimiter)
        is_plain = set(field.content_args) == {"tag_pattern"}
        if field.content == "xml-inline" and is_behind and is_plain and tags is not None:
            return TaggedCalls(str(name), field.content_args["tag_pattern"], tags[2].strip(), self._typed(str(name)))
        return None

    def _typed(self, name: str) -> Callable[[Mapping[str, str]], Mapping[str, Any]]:
        """Returns what gives arguments of a function the types of its schema."""

        def typed(arguments: Mapping[str, str]) -> Mapping[str, Any]:
            call = {"function": {"name": name, "arguments": dict(arguments)}}
            found: Mapping[str, Any] = self._coerce_tool_calls(call)["function"]["arguments"]
            return found

        return typed

    def cut(self) -> None:
        """Drops text that has been parsed; one character stays, for patterns that look back."""
        if self._pos > MAX_HELD_CHARS:
            self._buffer, self._pos = self._buffer[self._pos - 1 :], 1
            if self._current is None or self._spec.fields[self._current].content == "text":
                self._body = ""

    def end(self) -> list[dict[str, Any]]:
        """Closes all regions; returns the last events."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._raw = m.group(0)
        events[-1]["name"] = self._captures.get("name")

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, raw = self._current, self._raw + self._body
        is_explicit = field is not None and field != self._implicit_name
        num_before = len(events)
        try:
            super()._close_current(events)
        except Exception:  # content parsers raise whatever they like for an answer that is not as they expect
            del events[num_before:]
            events.append({"type": "region_error", "field": field, "raw": raw})
            self._reset_to_implicit()
            return
        for event in events[num_before:]:
            event["raw"] = raw if is_explicit else ""
        self._output.clear()  # events have all of it


def _delimiter(args: Mapping[str, Any]) -> str | None:
    """Returns the text around strings of JSON with bare keys; None for another dialect."""
    delimiters = args.get("string_delims")
    is_known = set(args) == {"string_delims", "unquoted_keys"} and args["unquoted_keys"] and len(delimiters or ()) == 1
    if not is_known or delimiters is None or delimiters[0][0] != delimiters[0][1]:
        return None
    found: str = delimiters[0][0]
    return found
