"""The answer to a chat as a response: streamed events, or the object that they end with."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from torchax_serve.server.chat import StartedChat
from torchax_serve.server.chat_answer import MessageReader
from torchax_serve.server.context import ServerContext
from torchax_serve.server.errors import ApiError
from torchax_serve.server.formats import LogprobFormat, usage_of
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.notes import note_once
from torchax_serve.server.parsed_message import ParsedStep
from torchax_serve.server.responses.items import ItemWriter
from torchax_serve.server.responses.schemas import ITEMS, ResponsesRequest
from torchax_serve.server.responses.store import MAX_BYTES
from torchax_serve.server.responses.translation import ENCRYPTED, LOGPROBS
from torchax_serve.server.sse import DONE, named_event
from torchax_serve.text.text_stream import AnswerStep


class ResponseAnswer:
    """One response, streamed or complete.

    Args:
        context: State of the server.
        service: The model.
        body: The request.
        started: Its answer, which runs.
        key: Name of the API key, whose store may have the response.
        items: Items of the conversation, those of earlier responses included.

    Attributes:
        response: The object of the response so far, without its output.
    """

    def __init__(
        self,
        context: ServerContext,
        service: ModelService,
        body: ResponsesRequest,
        started: StartedChat,
        key: str | None = None,
        items: Sequence[Any] = (),
    ) -> None:
        self._context, self._body, self._key, self._input = context, body, key, items
        (self._answer,), (parser,) = started
        self._reader = MessageReader(parser)
        custom = {tool.name for tool in body.tools or () if tool.type == "custom" and tool.name}
        self._items = ItemWriter(custom, seals=ENCRYPTED in (body.include or ()))
        self._format = LogprobFormat(service.token_bytes) if LOGPROBS in (body.include or ()) else None
        self._waiting: list[Any] = []  # log-probabilities of tokens whose text has not come
        self._num_events = 0
        self._is_cancelled = False
        self.response = _response_of(body, service)
        self.response["store"] = context.responses.is_on and body.store is not False

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the events of the streamed answer; those of one step are one piece."""
        begin = [{"type": f"response.{name}", "response": self._shown()} for name in ("created", "in_progress")]
        yield self._encoded(begin)
        async with contextlib.aclosing(self._steps()) as batches:
            async for batch in batches:
                yield self._encoded(batch)
        status = self.response["status"]
        yield self._encoded([{"type": f"response.{status}", "response": self._shown()}]) + DONE

    async def complete(self) -> dict[str, Any]:
        """Returns the response."""
        try:
            async with contextlib.aclosing(self._steps()) as batches:
                async for _ in batches:
                    pass
        except ApiError:
            if not self._is_cancelled:
                raise
            list(self._items.close("incomplete"))
            self._finish("cancelled")
        return self._shown()

    def failed(self, error: ApiError) -> bytes:
        """Returns the events of an error in mid-stream."""
        ends = list(self._items.close("incomplete"))
        code = "cancelled" if self._is_cancelled else error.code or error.type
        message = "the response was cancelled" if self._is_cancelled else error.message
        self.response["error"] = {"code": code, "message": message}
        self._finish("cancelled" if self._is_cancelled else "failed")
        return self._encoded([*ends, {"type": "response.failed", "response": self._shown()}]) + DONE

    def _cancel(self) -> None:
        self._is_cancelled = True
        self._answer.cancel()

    def _finish(self, status: str) -> None:
        """Ends the response, which is stored if it is to be."""
        self.response |= {"status": status, "usage": self._usage()}
        if self.response["store"]:
            given = ITEMS.dump_python(list(self._body.input), mode="json", by_alias=True, exclude_unset=True)
            before = ITEMS.dump_python(list(self._input), mode="json", by_alias=True, exclude_unset=True)
            given = [{**item, "id": item.get("id") or f"item_{uuid.uuid4().hex}"} for item in given]
            shown = self._shown()
            is_stored = self._context.responses.put(self._key, shown, given, [*before, *shown["output"]])
            if not is_stored:
                note_once(f"/v1/responses: a response is not stored, as it has more than {MAX_BYTES >> 20} MiB")
            self.response["store"] = is_stored

    async def _steps(self) -> AsyncGenerator[list[dict[str, Any]]]:
        """Yields the events of each step; behind the last one the response is complete."""
        if self.response["store"]:
            self._context.responses.begin(self._key, self.response["id"], self._cancel)
        try:
            async with contextlib.aclosing(self._answer.__aiter__()) as steps:
                async for step in steps:
                    self._context.metrics.step(self._answer, step)
                    parsed = self._reader.read(step)
                    reason = self._reader.finish_reason(step)  # raises before events that would not be sent are made
                    batch = list(self._items.push(parsed, self._logprobs(step, parsed)))
                    if reason is not None:
                        batch += self._end(reason)
                    if batch:
                        yield batch
        finally:
            self._context.responses.end(self._key, self.response["id"])

    def _logprobs(self, step: AnswerStep, parsed: ParsedStep) -> list[Any]:
        """Returns the log-probabilities of a step's tokens, if its text is part of a message.

        Those of tokens whose text comes with a later one are kept until then.
        """
        if self._format is None:
            return []
        if not self._reader.is_content and not parsed.content:
            self._waiting = []
            return []
        found = [*self._waiting, *self._format.chat(step.logprobs or (), self._body.top_logprobs or 0)]
        self._waiting = [] if parsed.content else found
        return found if parsed.content else []

    def _end(self, reason: str) -> Iterator[dict[str, Any]]:
        is_cut = reason == "length"
        yield from self._items.close("incomplete" if is_cut else "completed")
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self._finish("incomplete" if is_cut else "completed")

    def _usage(self) -> dict[str, Any]:
        found = usage_of([self._answer], len(self._answer.prompt_ids), self._reader.num_reasoning_tokens)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": found["completion_tokens_details"],
            "total_tokens": found["total_tokens"],
        }

    def _shown(self) -> dict[str, Any]:
        return {**self.response, "output": [dict(item) for item in self._items.items]}

    def _encoded(self, events: list[dict[str, Any]]) -> bytes:
        """Returns events with their numbers."""
        pieces = []
        for each in events:
            pieces.append(named_event({**each, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(pieces)


def _response_of(body: ResponsesRequest, service: ModelService) -> dict[str, Any]:
    """Returns a response that has just begun, with all fields of its interface."""
    echoed = {"text", "reasoning", "tools"}
    given = body.model_dump(mode="json", by_alias=True, exclude_unset=True, include=echoed)
    text, reasoning = given.get("text") or {}, given.get("reasoning") or {}
    config = service.model.request_defaults
    temperature, top_p = getattr(config, "temperature", None), getattr(config, "top_p", None)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": _first(body.temperature, temperature, 1.0),
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "text": {
            "format": _with_defaults(text.get("format") or {"type": "text"}),
            "verbosity": text.get("verbosity") or "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_with_defaults(tool) for tool in given.get("tools") or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _first(body.top_p, top_p, 1.0),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


_DEFAULTS: dict[str, dict[str, Any]] = {
    "function": {"description": None, "parameters": None, "strict": None},
    "json_schema": {"description": None, "strict": False},
}
"""Fields that a tool and a format have in an answer, by their type, whatever the request had."""


def _with_defaults(part: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool or a format of a request with all fields that its type has in an answer."""
    return _DEFAULTS.get(part["type"], {}) | part


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
