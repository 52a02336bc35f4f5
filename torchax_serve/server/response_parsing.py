"""Content, reasoning and tool calls of an answer while it comes, by response templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.server.call_ids import CallIds
from torchax_serve.server.call_stream import CallPiece
from torchax_serve.server.parsed_message import MessageWriter, ParsedStep
from torchax_serve.server.response_family import CALLS, MARKER, REASONING, SHOWN, ResponseFamily
from torchax_serve.server.schema_types import typed_tools


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

        template = family.template if tools else family.without_calls()
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._parser = TolerantParser(
            template, family.markers, reads_calls=bool(tools), schemas=schemas, tools=typed_tools(tools)
        )
        self._names = {tool["function"]["name"] for tool in tools}
        self._message = MessageWriter(max_tool_calls, CallIds(family.id_form))
        start = self._parser.answer_start(prompt).rstrip()  # spaces may begin a text, which the answer does not have
        self._take(self._parser.feed(start) if start else [], ParsedStep())
        self._message.drop_held()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is in the reasoning now."""
        return self._parser.field in REASONING

    @property
    def is_content(self) -> bool:
        """Whether the text is outside of reasoning, calls and markers now."""
        return self._parser.field in (None, "content")

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
        self._message.flush(step)
        return step

    def _take(self, events: Sequence[Mapping[str, Any]], step: ParsedStep) -> None:
        for event in events:
            field, kind = event["field"], event["type"]
            if field.startswith(MARKER):
                self._message.end_region(step)
            elif field.startswith(CALLS):
                self._take_calls(event, step)
            else:
                name = "reasoning" if field in REASONING else "content"
                if kind in ("region_chunk", "region_error"):
                    self._message.add_text(name, event.get("text", ""), step)
                if name == "reasoning" and kind != "region_chunk":
                    self._message.end_region(step)
                elif field.startswith(SHOWN) and kind != "region_chunk":
                    self._message.bound_content(step)

    def _take_calls(self, event: Mapping[str, Any], step: ParsedStep) -> None:
        """Takes an event of a region with tool calls."""
        self._message.add_pieces(event.get("pieces", ()), step)
        if event["type"] not in ("region_close", "region_error"):
            return
        if event.get("has_calls"):
            self._message.add_text("content", event["rest"], step)
        elif event["type"] == "region_close":
            self._add_complete(event["value"], event["raw"], step, is_marked=event["is_marked"])
        else:
            self._message.add_text("content", event["raw"], step)

    def _add_complete(self, value: Any, raw: str, step: ParsedStep, *, is_marked: bool) -> None:
        """Adds the calls of a region of which nothing was certain before its end.

        Without arguments, and without a text of the format in front, only a tool's name tells a call from other text.
        """
        if isinstance(value, Mapping) and isinstance(value.get("function"), list):
            value = value["function"]  # an object that is a call may be a list of them as well
        calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
        is_other = not is_marked and any(call is None or call.name not in self._names for call in calls)
        if not self._names or not calls or None in calls or is_other:
            self._message.add_text("content", raw, step)
            return
        self._message.add_pieces([call for call in calls if call is not None], step)


def begun_answer(family: ResponseFamily, prompt: str) -> str:
    """Returns the part of an answer that the text of its prompt has written already."""
    from torchax_serve.server.tolerant_parser import TolerantParser  # imports transformers

    return TolerantParser(family.template, family.markers, reads_calls=False).answer_start(prompt)


def _call(value: Any) -> CallPiece | None:
    """Returns a complete call; None for a value that is none."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        return None
    arguments = _arguments(function.get("arguments", function.get("parameters", {})))
    if arguments is None:
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    written = function.get("id", value.get("id"))
    return CallPiece(function["name"], text, is_last=True, id=written if isinstance(written, str) else None)


def _arguments(value: Any) -> Mapping[str, Any] | None:
    """Returns arguments, also of the JSON text of an object and of null; None for others."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, Mapping) else None
