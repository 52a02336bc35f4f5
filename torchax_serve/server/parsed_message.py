"""A message while it comes: its content, its reasoning, and its tool calls in pieces."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from torchax_serve.server.call_ids import CallIds
from torchax_serve.server.call_stream import CallPiece


@dataclasses.dataclass
class ParsedStep:
    """What a piece of text adds to a message.

    Attributes:
        content: Text of the answer.
        reasoning: Text of the reasoning.
        tool_calls: Pieces of tool calls, in the form of OpenAI's streamed messages: each has the `index` of its call,
            the first of a call its `id`, `type` and `name`, and all a piece of the JSON text of the arguments.
        late_ids: Ids that the model wrote behind the arguments, by the calls' indices; streamed calls keep the ids that
            their first pieces have.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    late_ids: dict[int, str] = dataclasses.field(default_factory=dict)

    def pieces(self) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
        """Returns the pieces that continue an open call, and those that follow the texts."""
        calls = self.tool_calls
        num_continuing = next((index for index, piece in enumerate(calls) if "id" in piece), len(calls))
        return calls[:num_continuing], calls[num_continuing:]


def joined_calls(steps: Iterable[ParsedStep]) -> list[dict[str, Any]]:
    """Returns the tool calls of steps, in the form of OpenAI's complete messages.

    An argument that the model has written more than once has its last value, as readers of the pieces find it.
    """
    found: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for step in steps:
        for piece in step.tool_calls:
            if "id" in piece:
                found.append({key: value for key, value in piece.items() if key != "index"})
                texts.append([])
            texts[piece["index"]].append(piece["function"]["arguments"])
        for index, written in step.late_ids.items():
            found[index]["id"] = written
    for call, pieces in zip(found, texts, strict=True):
        call["function"] = {"name": call["function"]["name"], "arguments": _with_one_value_each("".join(pieces))}
    return found


def _with_one_value_each(arguments: str) -> str:
    """Returns the JSON text of arguments without names that it has twice."""
    num_repeated = 0

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_repeated
        found = dict(pairs)
        num_repeated += len(pairs) - len(found)
        return found

    try:
        found = json.loads(arguments, object_pairs_hook=as_object)
        return json.dumps(found, ensure_ascii=False, allow_nan=False) if num_repeated else arguments
    except (ValueError, RecursionError):  # of a call that was cut
        return arguments


class MessageWriter:
    """Adds what parsers read to the steps of a message.

    Text is as it was written. Only line breaks between texts and what was parsed are left out, which templates write
    there: those at both ends of the reasoning, behind it, and in front of calls; and spaces between calls.

    Args:
        max_tool_calls: Most tool calls; what comes behind the last of them is dropped. None: any number.
        ids: Makes the ids of calls.

    Attributes:
        num_tool_calls: Calls so far.
    """

    def __init__(self, max_tool_calls: int | None = None, ids: CallIds | None = None) -> None:
        self._max_tool_calls, self._ids = max_tool_calls, ids or CallIds()
        self.num_tool_calls = self._num_complete = 0
        self._has_begun: set[str] = set()  # fields that have text
        self._held = {"content": "", "reasoning": ""}  # spaces that may be in front of something parsed
        self._is_behind_region = {"content": False, "reasoning": True}  # without text since then

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
        """Adds text to ``content`` or ``reasoning``; spaces at its end wait for what follows."""
        if self._is_full or not text:
            return
        text = self._held[field] + text
        shown = text.rstrip()
        self._held[field] = text[len(shown) :]
        if not shown:
            return
        if field not in self._has_begun and self._is_behind_region[field]:
            shown = shown.lstrip("\r\n")
        self._has_begun.add(field)
        self._is_behind_region[field] = False
        setattr(step, field, getattr(step, field) + shown)

    def end_region(self, step: ParsedStep) -> None:
        """Takes that a reasoning, a call or a marker was read; line breaks before it are no text."""
        for field, held in self._held.items():
            if not self._is_behind_region[field]:
                spaces = held.rstrip("\r\n") if field in self._has_begun else ""
                setattr(step, field, getattr(step, field) + spaces)
                self._held[field] = held[len(spaces) :]
        self._is_behind_region["content"] = True
        self._is_behind_region["reasoning"] = True

    def bound_content(self, step: ParsedStep) -> None:
        """Takes that content begins or ends here; spaces next to it are its own."""
        if not self._is_behind_region["content"]:
            step.content += self._held["content"]
        self._held["content"] = ""
        self._is_behind_region["content"] = False

    def flush(self, step: ParsedStep) -> None:
        """Adds spaces at the end of the message that stand in front of nothing that was parsed."""
        for field, held in self._held.items():
            if field not in self._has_begun and self._is_behind_region[field]:
                held = held.lstrip("\r\n")
            elif self._is_behind_region[field]:
                held = ""
            if not self.num_tool_calls or not self._is_behind_region[field]:
                setattr(step, field, getattr(step, field) + held)
        self.drop_held()

    def add_pieces(self, pieces: Sequence[CallPiece], step: ParsedStep) -> None:
        """Adds pieces of calls; those of calls beyond the most are dropped."""
        for piece in pieces:
            if piece.name is None and piece.id is not None:
                if self.num_tool_calls and self._ids.takes(piece.id):
                    step.late_ids[self.num_tool_calls - 1] = piece.id
                continue
            if piece.name is not None:
                if self._is_full:
                    return
                self.end_region(step)
                self.num_tool_calls += 1
                first = {"id": self._ids.id_of(piece.name, piece.id), "type": "function"}
                function = {"name": piece.name, "arguments": piece.text}
            else:
                first, function = {}, {"arguments": piece.text}
            step.tool_calls.append({"index": self.num_tool_calls - 1, **first, "function": function})
            self._num_complete += piece.is_last
