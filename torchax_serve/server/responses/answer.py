"""The answer to a chat as a response: streamed events, or the object that they end with."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from torchax_serve.server.chat import StartedChat
from torchax_serve.server.chat_answer import MessageReader
from torchax_serve.server.context import ServerContext
from torchax_serve.server.errors import ApiError
from torchax_serve.server.formats import LogprobFormat, usage_of
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.parsed_message import ParsedStep
from torchax_serve.server.responses.items import ItemWriter
from torchax_serve.server.responses.schemas import ResponsesRequest
from torchax_serve.server.responses.translation import ENCRYPTED, LOGPROBS
from torchax_serve.server.sse import DONE, named_event
from torchax_serve.text.step_decoder import AnswerStep


class ResponseAnswer:
    """One response, streamed or complete.

    Args:
        context: State of the server.
        service: The model.
        body: The request.
        started: Its answer, which runs.
    """

    def __init__(
        self, context: ServerContext, service: ModelService, body: ResponsesRequest, started: StartedChat
    ) -> None:
        self._context, self._body = context, body
        (self._answer,), (parser,) = started
        self._reader = MessageReader(parser)
        custom = {tool.name for tool in body.tools or () if tool.type == "custom" and tool.name}
        self._items = ItemWriter(custom, seals=ENCRYPTED in (body.include or ()))
        self._format = LogprobFormat(service.token_bytes) if LOGPROBS in (body.include or ()) else None
        self._num_events = 0
        self._response = _response_of(body, service)

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the events of the streamed answer; those of one step are one piece."""
        begin = [{"type": f"response.{name}", "response": self._shown()} for name in ("created", "in_progress")]
        yield self._encoded(begin)
        async with contextlib.aclosing(self._steps()) as batches:
            async for batch in batches:
                yield self._encoded(batch)
        status = self._response["status"]
        yield self._encoded([{"type": f"response.{status}", "response": self._shown()}]) + DONE

    async def complete(self) -> dict[str, Any]:
        """Returns the response."""
        async with contextlib.aclosing(self._steps()) as batches:
            async for _ in batches:
                pass
        return self._shown()

    def failed(self, error: ApiError) -> bytes:
        """Returns the events of an error in mid-stream."""
        ends = list(self._items.close("incomplete"))
        shown = {"code": error.code or error.type, "message": error.message}
        self._response |= {"status": "failed", "error": shown, "usage": self._usage()}
        return self._encoded([*ends, {"type": "response.failed", "response": self._shown()}]) + DONE

    async def _steps(self) -> AsyncGenerator[list[dict[str, Any]]]:
        """Yields the events of each step; behind the last one the response is complete."""
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

    def _logprobs(self, step: AnswerStep, parsed: ParsedStep) -> list[Any]:
        """Returns the log-probabilities of a step's tokens, if its text is part of a message."""
        if self._format is None or not parsed.content:
            return []
        return self._format.chat(step.logprobs or (), self._body.top_logprobs or 0)

    def _end(self, reason: str) -> Iterator[dict[str, Any]]:
        is_cut = reason == "length"
        yield from self._items.close("incomplete" if is_cut else "completed")
        self._response |= {"status": "incomplete" if is_cut else "completed", "usage": self._usage()}
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())

    def _usage(self) -> dict[str, Any]:
        found = usage_of([self._answer], len(self._answer.prompt_ids), self._reader.num_reasoning_tokens)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": found["completion_tokens_details"],
            "total_tokens": found["total_tokens"],
        }

    def _shown(self) -> dict[str, Any]:
        return {**self._response, "output": [dict(item) for item in self._items.items]}

    def _encoded(self, events: list[dict[str, Any]]) -> bytes:
        """Returns events with their numbers."""
        pieces = []
        for each in events:
            pieces.append(named_event({**each, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(pieces)


def _response_of(body: ResponsesRequest, service: ModelService) -> dict[str, Any]:
    """Returns a response that has just begun, with all fields of its interface."""
    given = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    text, reasoning = given.get("text") or {}, given.get("reasoning") or {}
    config = service.model.generation_config
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
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": _first(body.temperature, temperature, 1.0),
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": given.get("tools") or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _first(body.top_p, top_p, 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
