"""Output items of a response while they come, and their events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torchax_serve.server.call_arguments import unicode_text
from torchax_serve.server.parsed_message import ParsedStep
from torchax_serve.server.responses.translation import sealed

_TEXTS = {"message": ("output_text", "msg"), "reasoning": ("reasoning_text", "rs")}
"""Type of the text of an item, and beginning of the item's id."""


class ItemWriter:
    """Writes the items of one answer, one behind the other.

    Args:
        custom_names: Names of custom tools, whose calls have a text.
        seals: Whether reasoning has `encrypted_content`.

    Attributes:
        items: Items that are done, and the one that is open.
    """

    def __init__(self, custom_names: Collection[str], *, seals: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._custom_names, self._seals = custom_names, seals
        self._open: str | None = None  # type of the item that is open
        self._pieces: list[str] = []  # of its text or its arguments
        self._logprobs: list[Any] = []

    def push(self, parsed: ParsedStep, logprobs: Sequence[Any] = ()) -> Iterator[dict[str, Any]]:
        """Yields the events of what a step adds, the rest of an open call first."""
        continuing, others = parsed.pieces()
        yield from self._calls(continuing)
        if parsed.reasoning:
            yield from self._text("reasoning", parsed.reasoning)
        if parsed.content:
            yield from self._text("message", parsed.content, logprobs)
        yield from self._calls(others)

    def _calls(self, pieces: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if "id" in piece:
                yield from self._begin_call(piece["function"]["name"], piece["id"])
            if text := piece["function"]["arguments"]:
                self._pieces.append(text)
                if self._open == "function_call":
                    yield self._event("response.function_call_arguments.delta", delta=text)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Yields the end of the item that is open; `status` is ``incomplete`` for one that was cut."""
        if self._open is None:
            return
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        if self._open in _TEXTS:
            yield from self._end_text(item, text)
        elif self._open == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            item["input"] = _input_of(text)
            yield self._event("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", input=item["input"])
        self._open = None
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def _text(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> Iterator[dict[str, Any]]:
        part, prefix = _TEXTS[kind]
        if self._open != kind:
            item: dict[str, Any] = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind}
            further: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            item |= further
            yield from self._begin(item | {"status": "in_progress", "content": []})
            yield self._event("response.content_part.added", content_index=0, part=_part(part, ""))
        self._pieces.append(text)
        self._logprobs += logprobs
        found = {"logprobs": list(logprobs)} if kind == "message" else {}
        yield self._event(f"response.{part}.delta", content_index=0, delta=text, **found)

    def _end_text(self, item: dict[str, Any], text: str) -> Iterator[dict[str, Any]]:
        name = _TEXTS[item["type"]][0]
        part = _part(name, text, self._logprobs)
        item["content"] = [part]
        if item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(text)
        further = {"logprobs": list(self._logprobs)} if item["type"] == "message" else {}
        yield self._event(f"response.{name}.done", content_index=0, text=text, **further)
        yield self._event("response.content_part.done", content_index=0, part=part)

    def _begin_call(self, name: str, call_id: str) -> Iterator[dict[str, Any]]:
        if name in self._custom_names:
            item = {"id": f"ctc_{uuid.uuid4().hex}", "type": "custom_tool_call", "input": ""}
        else:
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "arguments": ""}
        yield from self._begin(item | {"call_id": call_id, "name": name, "status": "in_progress"})

    def _begin(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self._open, self._pieces, self._logprobs = item["type"], [], []
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _part(kind: str, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    further: dict[str, Any] = {"annotations": [], "logprobs": list(logprobs)} if kind == "output_text" else {}
    return {"type": kind, "text": text, **further}


def _input_of(text: str) -> str:
    """Returns the text of a custom tool's call; arguments in another form as they are."""
    try:
        found = json.loads(text)["input"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return unicode_text(text)
    return unicode_text(found if isinstance(found, str) else text)
