"""Content, reasoning and tool calls of an answer while it comes, by transformers' parser of response templates."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.server.response_families import MARKER, REASONING, ResponseFamily


@dataclasses.dataclass
class ParsedStep:
    """What a piece of text adds to a message.

    Attributes:
        content: Text of the answer.
        reasoning: Text of the reasoning.
        tool_calls: Complete tool calls, in the form of OpenAI's messages.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class AnswerParser:
    """Parses one answer, piece by piece: the pieces' joined results do not depend on where the text is cut.

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
        self._reads_tools = bool(tools)
        self._max_tool_calls = max_tool_calls
        self.num_tool_calls = 0
        self._has_begun: set[str] = set()  # fields whose leading spaces are gone
        self._held = {"content": "", "reasoning": ""}  # spaces that may end the field
        start = self._parser.answer_start(prompt)
        self._take(self._parser.feed(start) if start else [], ParsedStep())
        self._held = dict.fromkeys(self._held, "")

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is in the reasoning now."""
        return self._parser.field in REASONING

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
                if kind == "region_close":
                    self._add_calls(event["value"], event["raw"], step)
                elif kind == "region_error":
                    self._add_text("content", event["raw"], step)
            elif kind in ("region_chunk", "region_error"):
                self._add_text("reasoning" if field in REASONING else "content", event.get("text", ""), step)

    def _add_text(self, field: str, text: str, step: ParsedStep) -> None:
        """Adds text without the spaces at the beginning and the end of the field."""
        if self._max_tool_calls is not None and self.num_tool_calls >= self._max_tool_calls:
            return
        text = self._held[field] + text
        if field not in self._has_begun:
            text = text.lstrip()
            if not text:
                self._held[field] = ""
                return
            self._has_begun.add(field)
        shown = text.rstrip()
        self._held[field] = text[len(shown) :]
        setattr(step, field, getattr(step, field) + shown)

    def _add_calls(self, value: Any, raw: str, step: ParsedStep) -> None:
        calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
        if not self._reads_tools or not calls or None in calls:
            self._add_text("content", raw, step)
            return
        for call in calls:
            if self._max_tool_calls is None or self.num_tool_calls < self._max_tool_calls:
                self.num_tool_calls += 1
                step.tool_calls.append(call)  # type: ignore[arg-type]  # None is not in them


def _call(value: Any) -> dict[str, Any] | None:
    """Returns a tool call of OpenAI's messages; None for a value that is none."""
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
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }
