"""Answers in Ollama's form: an object a line, or one object."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from torchax_serve.server.answers import Answer
from torchax_serve.server.call_arguments import input_of
from torchax_serve.server.chat_answer import MessageReader
from torchax_serve.server.context import ServerContext
from torchax_serve.server.errors import ApiError
from torchax_serve.server.formats import LogprobFormat
from torchax_serve.server.harmony import HarmonyParser
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.ollama.errors import error_content
from torchax_serve.server.parsed_message import ParsedStep, joined_calls
from torchax_serve.server.response_parsing import AnswerParser
from torchax_serve.text.text_stream import AnswerStep

NDJSON = b"application/x-ndjson"
"""Type of streams of objects, one a line."""
NS = 10**9
"""Nanoseconds of a second."""
Form = Literal["message", "response"]
"""Field with the answer's text: of chats a message, of prompts a text."""


def line(content: Mapping[str, Any]) -> bytes:
    """Returns an object as a line of a stream."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def failed(error: ApiError) -> bytes:
    """Returns the line of an error in a stream."""
    return line(error_content(error))


def timestamp(seconds: float | None = None) -> str:
    """Returns a time in seconds since 1970, or now, in RFC 3339's form."""
    now = datetime.datetime.now(datetime.UTC)
    given = now if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return given.isoformat(timespec="microseconds").replace("+00:00", "Z")


def empty_answer(model: str, form: Form) -> dict[str, Any]:
    """Returns the answer to a request without a message, by which clients load a model."""
    text: Any = {"role": "assistant", "content": ""} if form == "message" else ""
    return {"model": model, "created_at": timestamp(), form: text, "done_reason": "load", "done": True}


class OllamaAnswer:
    """One answer, streamed or complete.

    Args:
        context: State of the server.
        service: The model.
        model: Its name in the request.
        answer: The answer, which runs.
        parser: Of reasoning and tool calls; None for plain text.
        form: Where its text stands.
        num_top: Likeliest tokens with log-probabilities; None without any.
    """

    def __init__(
        self,
        context: ServerContext,
        service: ModelService,
        model: str,
        answer: Answer,
        parser: AnswerParser | HarmonyParser | None,
        form: Form,
        num_top: int | None,
    ) -> None:
        self._context, self._model, self._answer, self._form, self._num_top = context, model, answer, form, num_top
        self._reader = MessageReader(parser)
        self._format = LogprobFormat(service.token_bytes)
        self._calls: list[ParsedStep] = []

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yields the lines of the streamed answer; those of one step are one piece."""
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for each in pieces:
                yield b"".join(map(line, each))

    async def complete(self) -> dict[str, Any]:
        """Returns the object that the lines spell."""
        content, thinking, calls, logprobs, last = [], [], [], [], dict[str, Any]()
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for batch in pieces:
                for last in batch:
                    part = last["message"] if self._form == "message" else last
                    content.append(part.get("content" if self._form == "message" else "response", ""))
                    thinking.append(part.get("thinking", ""))
                    calls += part.get("tool_calls", ())
                    logprobs += last.get("logprobs", ())
        found = self._object("".join(content), "".join(thinking), calls, logprobs)
        return {**last, **found, "done": True}

    async def _pieces(self) -> AsyncGenerator[list[dict[str, Any]]]:
        async with contextlib.aclosing(self._answer.__aiter__()) as steps:
            async for step in steps:
                self._context.metrics.step(self._answer, step)
                parsed, found = self._reader.read(step), []
                self._calls.append(ParsedStep(tool_calls=parsed.tool_calls, late_ids=parsed.late_ids))
                logprobs = self._logprobs(step)
                if parsed.content or parsed.reasoning or logprobs:
                    found.append(self._object(parsed.content, parsed.reasoning, [], logprobs))
                if (reason := self._reader.finish_reason(step)) is not None:
                    if calls := [_call(each, index) for index, each in enumerate(joined_calls(self._calls))]:
                        found.append(self._object("", "", calls, []))
                    found.append(self._object("", "", [], []) | self._end(reason))
                if found:
                    yield found

    def _object(self, content: str, thinking: str, calls: list[Any], logprobs: list[Any]) -> dict[str, Any]:
        text: dict[str, Any] = {"role": "assistant", "content": content}
        if self._form == "response":
            text = {"response": content}
        text |= {"thinking": thinking} if thinking else {}
        text |= {"tool_calls": calls} if calls else {}
        found: dict[str, Any] = {"model": self._model, "created_at": timestamp()}
        found |= text if self._form == "response" else {"message": text}
        return {**found, "done": False, **({"logprobs": logprobs} if logprobs else {})}

    def _logprobs(self, step: AnswerStep) -> list[dict[str, Any]]:
        if self._num_top is None:
            return []
        return self._format.chat(step.logprobs or (), self._num_top)

    def _end(self, reason: str) -> dict[str, Any]:
        """Returns the fields of the last object: counts, and times in nanoseconds."""
        answer = self._answer
        first, last = answer.first_s or answer.submitted_s, answer.last_s or answer.submitted_s
        started = min(answer.started_s or answer.submitted_s, first)
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": int((last - answer.submitted_s) * NS),
            "load_duration": 0,
            "prompt_eval_count": len(answer.prompt_ids),
            "prompt_eval_duration": int((first - started) * NS),
            "eval_count": answer.num_tokens,
            "eval_duration": int((last - first) * NS),
        }


def _call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Returns a call whose arguments are an object."""
    function = call["function"]
    arguments = input_of(function["arguments"])
    return {"id": call["id"], "function": {"index": index, "name": function["name"], "arguments": arguments}}
