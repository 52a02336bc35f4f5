"""The answer to a chat in OpenAI's form: streamed pieces, or one message."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from torchax_serve.server.answers import Answer
from torchax_serve.server.context import ServerContext
from torchax_serve.server.formats import NOT_GIVEN, LogprobFormat, finish_reason_of, usage_of
from torchax_serve.server.harmony import HarmonyParser
from torchax_serve.server.merged_answers import merged_steps
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.parsed_message import ParsedStep, joined_calls
from torchax_serve.server.response_parsing import AnswerParser
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.sse import DONE, event
from torchax_serve.text.text_stream import AnswerStep

_NOT_WRITTEN = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
"""Parts of a message that vLLM's clients may read, and that models do not write here, or not always."""


class MessageReader:
    """What one answer's steps add to its message.

    Args:
        parser: Of reasoning and tool calls; None for plain text.

    Attributes:
        num_reasoning_tokens: Tokens of the reasoning so far.
        is_content: Whether the last step's tokens stand outside of reasoning and tool calls.
    """

    def __init__(self, parser: AnswerParser | HarmonyParser | None) -> None:
        self._parser = parser
        self.num_reasoning_tokens, self.is_content = 0, True

    def read(self, step: AnswerStep) -> ParsedStep:
        """Takes a step of the answer."""
        if self._parser is None:
            return ParsedStep(content=step.text)
        was_reasoning, was_content = self._parser.is_reasoning, self._parser.is_content
        found = self._parser.push(step.text)
        has_others = bool(found.reasoning or found.tool_calls)
        self.is_content = bool(found.content) or (was_content and self._parser.is_content and not has_others)
        if was_reasoning or self._parser.is_reasoning:
            self.num_reasoning_tokens += len(step.token_ids)
        if step.finish_reason is not None:
            rest = self._parser.flush()
            found.content += rest.content
            found.reasoning += rest.reasoning
            found.tool_calls += rest.tool_calls
        return found

    def finish_reason(self, step: AnswerStep) -> str | None:
        """Returns OpenAI's name of the reason for the end; None while the answer goes on."""
        reason = finish_reason_of(step.finish_reason)
        has_calls = self._parser is not None and self._parser.has_complete_calls
        return "tool_calls" if reason == "stop" and has_calls else reason


class ChatCompletion:
    """A chat's answers, streamed or complete.

    Args:
        context: State of the server.
        service: The model.
        request: Body of the request.
        answers: Its answers.
        parsers: A parser for each answer; None for plain text.
    """

    def __init__(
        self,
        context: ServerContext,
        service: ModelService,
        request: ChatRequest,
        answers: list[Answer],
        parsers: Sequence[AnswerParser | HarmonyParser | None],
    ) -> None:
        self._context, self._request, self._answers = context, request, answers
        self._fingerprint = service.fingerprint
        self._readers = [MessageReader(parser) for parser in parsers]
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._format = LogprobFormat(service.token_bytes, as_ids=bool(request.return_tokens_as_token_ids))

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        num_reasoning = sum(reader.num_reasoning_tokens for reader in self._readers)
        return usage_of(self._answers, len(self._answers[0].prompt_ids), num_reasoning)

    async def complete(self) -> dict[str, Any]:
        """Returns the body of the complete answer."""
        steps: list[list[AnswerStep]] = [[] for _ in self._answers]
        parsed: list[list[ParsedStep]] = [[] for _ in self._answers]
        async with contextlib.aclosing(merged_steps(self._answers)) as batches:
            async for batch in batches:
                for answer, step in batch:
                    steps[answer.index].append(step)
                    parsed[answer.index].append(self._readers[answer.index].read(step))
                    self._context.metrics.step(answer, step)
        choices = [self._choice(index, steps[index], parsed[index]) for index in range(len(self._answers))]
        found = self._envelope("chat.completion", choices)
        found |= {"service_tier": "default", "system_fingerprint": self._fingerprint, "usage": self._usage()}
        without = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None, **NOT_GIVEN}
        return found | without | self._prompt_fields()

    def _choice(self, index: int, steps: list[AnswerStep], parsed: list[ParsedStep]) -> dict[str, Any]:
        content = "".join(each.content for each in parsed)
        reasoning = "".join(each.reasoning for each in parsed)
        calls = joined_calls(parsed)
        message: dict[str, Any] = {"role": "assistant", "content": content, **_NOT_WRITTEN}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if reasoning and self._request.include_reasoning is not False:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(steps),
            "finish_reason": self._readers[index].finish_reason(steps[-1]),
            "stop_reason": steps[-1].stop,
            "token_ids": None,
            "routed_experts": None,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [token_id for step in steps for token_id in step.token_ids]
        return choice

    def _logprobs(self, steps: list[AnswerStep]) -> dict[str, Any] | None:
        num_top = self._request.num_top
        if num_top is None:
            return None
        found = [each for step in steps for each in step.logprobs or ()]
        return {"content": self._format.chat(found, num_top), "refusal": None}

    def _prompt_fields(self) -> dict[str, Any]:
        """Returns vLLM's fields about the prompt, as far as they were requested."""
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = list(self._answers[0].prompt_ids)
        if self._request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._format.prompt(self._answers[0].prompt_logprobs or ())
        return fields

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the events of a streamed answer; those of one step are one piece."""
        options = self._request.stream_options
        opened: set[int] = set()
        async with contextlib.aclosing(merged_steps(self._answers)) as batches:
            async for batch in batches:
                pieces = []
                for answer, step in batch:
                    self._context.metrics.step(answer, step)
                    if answer.index not in opened:
                        further = {} if opened else {"prompt_token_ids": None, **self._prompt_fields()}
                        opened.add(answer.index)
                        delta = {"role": "assistant", "content": ""}
                        pieces.append(self._chunk(answer, delta, further=further))
                    pieces += self._step_chunks(answer, step)
                if pieces:
                    yield b"".join(pieces)
        if options and options.include_usage:
            yield event(self._envelope("chat.completion.chunk", []) | {"usage": self._usage()})
        yield DONE

    def _step_chunks(self, answer: Answer, step: AnswerStep) -> list[bytes]:
        """Returns the events of a step: its text, its tool calls, and the end."""
        reader = self._readers[answer.index]
        parsed = reader.read(step)
        deltas: list[dict[str, Any]] = []
        if parsed.reasoning and self._request.include_reasoning is not False:
            deltas.append({"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning})
        if parsed.content:
            deltas.append({"content": parsed.content})
        deltas += [{"tool_calls": [piece]} for piece in parsed.tool_calls]
        has_ids = bool(self._request.return_token_ids and step.token_ids)
        logprobs = self._logprobs([step]) if step.logprobs else None
        if not deltas and (logprobs or has_ids):
            deltas.append({"content": ""})
        chunks = []
        for number, delta in enumerate(deltas):
            fields: dict[str, Any] = {} if number else {"logprobs": logprobs}
            if has_ids and not number:
                fields["token_ids"] = list(step.token_ids)
            chunks.append(self._chunk(answer, delta, **fields))
        if (reason := reader.finish_reason(step)) is not None:
            chunks.append(self._chunk(answer, {}, finish_reason=reason, stop_reason=step.stop))
        return chunks

    def _chunk(
        self,
        answer: Answer,
        delta: dict[str, Any],
        *,
        further: dict[str, Any] | None = None,
        **fields: Any,
    ) -> bytes:
        choice = {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
        choice |= fields
        chunk = self._envelope("chat.completion.chunk", [choice]) | (further or {})
        chunk["system_fingerprint"] = self._fingerprint
        options = self._request.stream_options
        if options and (options.include_usage or options.continuous_usage_stats):
            chunk["usage"] = self._usage() if options.continuous_usage_stats else None
        return event(chunk)
