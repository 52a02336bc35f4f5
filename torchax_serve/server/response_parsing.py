"""Content, reasoning and tool calls of an answer while it comes, by response templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.server.call_stream import CallPiece, CallStream
from torchax_serve.server.parsed_message import MessageWriter, ParsedStep
from torchax_serve.server.response_families import MARKER, REASONING, ResponseFamily


class AnswerParser:
    """Parses one answer, piece by piece.

    The pieces' joined results do not depend on where the text is cut.

    What does not parse is content, and no text raises.

    Args:
        family: How the model's answers are spelled.
        prompt: The prompt's text, which may open the reasoning.
        tools: Tools of the request, whose schemas say the types of arguments.
        max_tool_calls: Most tool calls; text behind the last of them is dropped. None: any number.
    """

    def __init__(
        self,
        family: ResponseFamily,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tool_calls: int | None = None,
    ) -> None:
        from torchax_serve.server.tolerant_parser import TolerantParser  # imports transformers

        self._parser = TolerantParser(dict(family.template), prefix="", tools=[dict(tool) for tool in tools])
        self._reads_tools, self._tool_tags = bool(tools), None if family.call is None else family.call.argument
        self._message = MessageWriter(max_tool_calls)
        self._calls: CallStream | None = None  # of the region that is open
        self._has_calls = False  # whether that region has a call so far
        start = self._parser.answer_start(prompt)
        self._take(self._parser.feed(start) if start else [], ParsedStep())
        self._message.drop_held()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is in the reasoning now."""
        return self._parser.field in REASONING

    @property
    def has_complete_calls(self) -> bool:
        """Whether the answer has tool calls, and the arguments of each are complete."""
        return self._message.calls_are_complete

    def push(self, text: str) -> ParsedStep:
        """Takes a piece of the answer; returns what became certain."""
        step = ParsedStep()
        self._take(self._parser.feed(text), step)
        self._parser.cut()
        return step

    def flush(self) -> ParsedStep:
        """Returns the rest, after the last piece."""
        step = ParsedStep()
        self._take(self._parser.end(), step)
        return step

    def _take(self, events: Sequence[Mapping[str, Any]], step: ParsedStep) -> None:
        for event in events:
            field, kind = event["field"], event["type"]
            if field.startswith(MARKER):
                continue
            if field == "tool_calls":
                self._take_calls(event, step)
            elif kind in ("region_chunk", "region_error"):
                self._message.add_text("reasoning" if field in REASONING else "content", event.get("text", ""), step)

    def _take_calls(self, event: Mapping[str, Any], step: ParsedStep) -> None:
        """Takes an event of a region with tool calls."""
        kind = event["type"]
        if kind == "region_open":
            stream = self._parser.call_stream(event, self._tool_tags) if self._reads_tools else None
            self._calls, self._has_calls = stream, False
        elif kind == "region_chunk":
            self._add(self._calls.push(event["text"]) if self._calls is not None else [], step)
        else:
            self._add(self._calls.close() if self._calls is not None else [], step)
            if self._has_calls:
                assert self._calls is not None
                self._message.add_text("content", self._calls.rest, step)
            elif kind == "region_close":
                self._add_complete(event["value"], event["raw"], step)
            else:
                self._message.add_text("content", event["raw"], step)
            self._calls = None

    def _add(self, pieces: Sequence[CallPiece], step: ParsedStep) -> None:
        self._has_calls = self._has_calls or bool(pieces)
        self._message.add_pieces(pieces, step)

    def _add_complete(self, value: Any, raw: str, step: ParsedStep) -> None:
        """Adds the calls of a region of which nothing was certain before its end."""
        calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
        if not self._reads_tools or not calls or None in calls:
            self._message.add_text("content", raw, step)
            return
        self._message.add_pieces([call for call in calls if call is not None], step)


def _call(value: Any) -> CallPiece | None:
    """Returns a complete call; None for a value that is none."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        return None
    arguments = function.get("arguments", function.get("parameters", {}))
    if not isinstance(arguments, Mapping):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return CallPiece(function["name"], text, is_last=True)
