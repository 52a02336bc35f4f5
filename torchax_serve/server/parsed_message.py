"""A message while it comes: its content, its reasoning, and its tool calls in pieces."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from torchax_serve.server.call_stream import CallPiece


@dataclasses.dataclass
class ParsedStep:
    """What a piece of text adds to a message.

    Attributes:
        content: Text of the answer.
        reasoning: Text of the reasoning.
        tool_calls: Pieces of tool calls, in the form of OpenAI's streamed messages: each has the `index` of its call,
            the first of a call its `id`, `type` and `name`, and all a piece of the JSON text of the arguments.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def joined_calls(steps: Iterable[ParsedStep]) -> list[dict[str, Any]]:
    """Returns the tool calls of steps, in the form of OpenAI's complete messages."""
    found: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for step in steps:
        for piece in step.tool_calls:
            if "id" in piece:
                found.append({key: value for key, value in piece.items() if key != "index"})
                texts.append([])
            texts[piece["index"]].append(piece["function"]["arguments"])
    for call, pieces in zip(found, texts, strict=True):
        call["function"] = {"name": call["function"]["name"], "arguments": "".join(pieces)}
    return found


class MessageWriter:
    """Adds what parsers read to the steps of a message.

    Args:
        max_tool_calls: Most tool calls; what comes behind the last of them is dropped. None: any number.

    Attributes:
        num_tool_calls: Calls so far.
    """

    def __init__(self, max_tool_calls: int | None = None) -> None:
        self._max_tool_calls = max_tool_calls
        self.num_tool_calls = self._num_complete = 0
        self._has_begun: set[str] = set()  # fields whose leading spaces are gone
        self._held = {"content": "", "reasoning": ""}  # spaces that may end the field

    @property
    def calls_are_complete(self) -> bool:
        """Whether there are calls, and the arguments of each are complete."""
        return 0 < self.num_tool_calls == self._num_complete

    @property
    def _is_full(self) -> bool:
        return self._max_tool_calls is not None and self.num_tool_calls >= self._max_tool_calls

    def drop_held(self) -> None:
        """Drops spaces that may end a field."""
        self._held = dict.fromkeys(self._held, "")

    def add_text(self, field: str, text: str, step: ParsedStep) -> None:
        """Adds text to ``content`` or ``reasoning``, without spaces at either end of the field."""
        if self._is_full:
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

    def add_pieces(self, pieces: Sequence[CallPiece], step: ParsedStep) -> None:
        """Adds pieces of calls; those of calls beyond the most are dropped."""
        for piece in pieces:
            if piece.name is not None:
                if self._is_full:
                    return
                self.num_tool_calls += 1
                first = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                function = {"name": piece.name, "arguments": piece.text}
            else:
                first, function = {}, {"arguments": piece.text}
            step.tool_calls.append({"index": self.num_tool_calls - 1, **first, "function": function})
            self._num_complete += piece.is_last
