"""The answer to a chat in Anthropic's form: streamed events, or the message that they spell."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from torchax_serve.server.anthropic.schemas import ID_PREFIX
from torchax_serve.server.call_arguments import input_of
from torchax_serve.server.chat import StartedChat
from torchax_serve.server.chat_answer import MessageReader
from torchax_serve.server.context import ServerContext
from torchax_serve.server.parsed_message import ParsedStep
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.sse import named_event
from torchax_serve.text.text_stream import AnswerStep

PING = named_event({"type": "ping"})
"""An event that says nothing, with which a silent stream shows that it lives."""
_TEXT_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageAnswer:
    """One message, streamed or complete.

    Args:
        context: State of the server.
        request: The chat.
        started: Its answer, which runs.
    """

    def __init__(self, context: ServerContext, request: ChatRequest, started: StartedChat) -> None:
        self._context, self._request = context, request
        (self._answer,), (parser,) = started
        self._reader = MessageReader(parser)
        self._id = f"msg_{uuid.uuid4().hex[:24]}"
        self._num_blocks, self._open = 0, ""  # type of the block that is open
        self._thinking = hashlib.sha256()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the events of the streamed answer; those of one step are one piece."""
        async with contextlib.aclosing(self._events()) as batches:
            async for batch in batches:
                yield b"".join(map(named_event, batch))

    async def complete(self) -> dict[str, Any]:
        """Returns the message that the events spell."""
        message: dict[str, Any] = {}
        pieces: list[list[str]] = []
        async with contextlib.aclosing(self._events()) as batches:
            async for batch in batches:
                for each in batch:
                    if each["type"] == "message_start":
                        message = each["message"]
                    elif each["type"] == "content_block_start":
                        message["content"].append(each["content_block"])
                        pieces.append([])
                    elif each["type"] == "content_block_delta":
                        _add_delta(message["content"][-1], pieces[-1], each["delta"])
                    elif each["type"] == "message_delta":
                        message |= each["delta"]
                        message["usage"] |= each["usage"]
        for block, texts in zip(message["content"], pieces, strict=True):
            field = {"tool_use": "input"}.get(block["type"], block["type"])
            block[field] = input_of("".join(texts)) if field == "input" else "".join(texts)
        return message

    async def _events(self) -> AsyncGenerator[list[dict[str, Any]]]:
        """Yields the events of each step."""
        has_begun = False
        async with contextlib.aclosing(self._answer.__aiter__()) as steps:
            async for step in steps:
                self._context.metrics.step(self._answer, step)
                batch: list[dict[str, Any]] = []
                if not has_begun:
                    batch += [{"type": "message_start", "message": self._message()}, {"type": "ping"}]
                    has_begun = True
                batch += self._of_step(self._reader.read(step))
                if (reason := self._reader.finish_reason(step)) is not None:
                    batch += self._end(reason, step)
                if batch:
                    yield batch

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Returns the usage: tokens of the prompt that were cached count apart from the others."""
        num_cached = self._answer.num_cached_tokens
        return {
            "input_tokens": len(self._answer.prompt_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._answer.num_tokens,
        }

    def _of_step(self, parsed: ParsedStep) -> Iterator[dict[str, Any]]:
        """Yields the events of what a step adds, the rest of an open call first."""
        continuing, others = parsed.pieces()
        yield from self._calls(continuing)
        if parsed.reasoning:
            yield from self._text("thinking", parsed.reasoning)
        if parsed.content:
            yield from self._text("text", parsed.content)
        yield from self._calls(others)

    def _calls(self, pieces: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if "id" in piece:
                name, call_id = piece["function"]["name"], f"{ID_PREFIX}{piece['id'].removeprefix('call_')}"
                yield from self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            if text := piece["function"]["arguments"]:
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        if kind == "thinking":
            self._thinking.update(text.encode())
        name, field = _TEXT_DELTAS[kind]
        yield self._delta({"type": name, field: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._stop()
        self._open, self._thinking = block["type"], hashlib.sha256()
        self._num_blocks += 1
        yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _stop(self) -> Iterator[dict[str, Any]]:
        """Yields the end of the block that is open.

        A thought's signature is its digest, which nobody has to check.
        """
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._thinking.hexdigest()})
        if self._open:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = ""

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _end(self, reason: str, step: AnswerStep) -> Iterator[dict[str, Any]]:
        yield from self._stop()
        sequence = step.stop if isinstance(step.stop, str) else None
        stop_reason = {"tool_calls": "tool_use", "stop": "end_turn"}.get(reason, "max_tokens")
        if reason == "stop" and sequence is not None:
            stop_reason = "stop_sequence"
        is_bounded = self._answer.num_tokens < (self._request.max_tokens or 0)
        if stop_reason == "max_tokens" and is_bounded:  # the model has no more room
            stop_reason = "model_context_window_exceeded"
        delta = {"stop_reason": stop_reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield {"type": "message_stop"}


def _add_delta(block: dict[str, Any], pieces: list[str], delta: dict[str, Any]) -> None:
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        pieces.append(next(value for name, value in delta.items() if name != "type"))
