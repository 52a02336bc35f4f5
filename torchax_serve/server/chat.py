"""``/v1/chat/completions``."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from torchax_serve.server.answers import Answer, AnswerOptions
from torchax_serve.server.body import read_json
from torchax_serve.server.context import ServerContext, context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.formats import LogprobFormat, finish_reason_of, usage_of
from torchax_serve.server.messages import plain_messages
from torchax_serve.server.model_service import ModelService, scoped_salt
from torchax_serve.server.request_checks import check_counts
from torchax_serve.server.sampling import renamed_error, sampling_params
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.sse import DONE, EventStream, event, until_disconnect
from torchax_serve.server.streams import merged_steps
from torchax_serve.text.chat_template import ChatOptions
from torchax_serve.text.prompt import DEFAULT_CHAT_MAX_NEW_TOKENS
from torchax_serve.text.step_decoder import AnswerStep


async def chat_completions(request: Request) -> Any:
    """Answers a conversation."""
    context = context_of(request)
    service = context.service()
    service.require("chat", "/v1/chat/completions")
    body = ChatRequest.parse(await read_json(request, context.options))
    service.check_name(body.model)
    check_counts(body, context.options.request)
    answers = await until_disconnect(request.receive, _start(context, service, body, request.state.key_name))
    completion = ChatCompletion(context, service, body, answers)
    if body.stream:
        return EventStream(completion.events(), context.options.keep_alive_s)
    return JSONResponse(await until_disconnect(request.receive, completion.complete()))


async def _start(
    context: ServerContext, service: ModelService, body: ChatRequest, key_name: str | None
) -> list[Answer]:
    try:
        return await service.run(_start_answers, context, service, body, key_name)
    except ApiError:
        raise
    except Exception as error:
        raise renamed_error(error, body) if isinstance(error, ValueError) else error from error


def chat_options(service: ModelService, body: ChatRequest) -> ChatOptions:
    """Returns the options of the chat template in a request."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if "reasoning_effort" in service.template:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        if "enable_thinking" in service.template:
            variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    return ChatOptions.of(None, body.documents, variables, bool(body.continue_final_message))


def render_chat(service: ModelService, body: ChatRequest) -> list[int]:
    """Returns the token ids of a request's conversation."""
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise bad_request(
            "add_generation_prompt: expected true, or continue_final_message with it; an answer begins a message",
            "add_generation_prompt",
            "invalid_value",
        )
    return service.chat_prompt(plain_messages(body.messages, service.template), chat_options(service, body))


def _start_answers(
    context: ServerContext, service: ModelService, body: ChatRequest, key_name: str | None
) -> list[Answer]:
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(
        body,
        service.model.tokenizer,
        max_new_tokens=most,
        cache_salt=scoped_salt(key_name, body.cache_salt),
        timeout_s=context.options.request_timeout_s,
    )
    prompt = render_chat(service, body)
    options = AnswerOptions(
        num_answers=body.n or 1,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
        default_max_new_tokens=service.max_model_len or DEFAULT_CHAT_MAX_NEW_TOKENS,
    )
    return service.start([prompt], params, options)


class ChatCompletion:
    """A chat's answer, streamed or complete."""

    def __init__(
        self, context: ServerContext, service: ModelService, request: ChatRequest, answers: list[Answer]
    ) -> None:
        self._context, self._service = context, service
        self._request, self._answers = request, answers
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
        return usage_of(self._answers, len(self._answers[0].prompt_ids))

    async def complete(self) -> dict[str, Any]:
        """Returns the body of the complete answer."""
        parts: list[list[AnswerStep]] = [[] for _ in self._answers]
        async with contextlib.aclosing(merged_steps(self._answers)) as batches:
            async for batch in batches:
                for answer, step in batch:
                    parts[answer.index].append(step)
                    self._context.metrics.step(answer, step)
        found = self._envelope("chat.completion", [self._choice(index, steps) for index, steps in enumerate(parts)])
        found |= {"service_tier": "default", "system_fingerprint": self._context.fingerprint, "usage": self._usage()}
        return found | self._prompt_fields()

    def _choice(self, index: int, steps: list[AnswerStep]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(step.text for step in steps), "refusal": None}
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(steps),
            "finish_reason": finish_reason_of(steps[-1].finish_reason),
            "stop_reason": steps[-1].stop,
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
        with_usage = bool(options and (options.include_usage or options.continuous_usage_stats))
        opened: set[int] = set()
        async with contextlib.aclosing(merged_steps(self._answers)) as batches:
            async for batch in batches:
                pieces = []
                for answer, step in batch:
                    self._context.metrics.step(answer, step)
                    if answer.index not in opened:
                        further = {} if opened else self._prompt_fields()
                        opened.add(answer.index)
                        pieces.append(self._chunk(self._opening(answer), with_usage, False, further))
                    pieces += [self._chunk(choice, with_usage, True) for choice in self._delta_choices(answer, step)]
                if pieces:
                    yield b"".join(pieces)
        if options and options.include_usage:
            yield event(self._envelope("chat.completion.chunk", []) | {"usage": self._usage()})
        yield DONE

    def _opening(self, answer: Answer) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta_choices(self, answer: Answer, step: AnswerStep) -> list[dict[str, Any]]:
        """Returns the choices of the chunks for a step: its text, and the end."""
        choices = []
        has_ids = bool(self._request.return_token_ids and step.token_ids)
        logprobs = self._logprobs([step]) if step.logprobs else None
        if step.text or logprobs or has_ids:
            delta = {"content": step.text}
            choice = {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            choices.append(choice | ({"token_ids": list(step.token_ids)} if has_ids else {}))
        if (reason := finish_reason_of(step.finish_reason)) is not None:
            end = {"index": answer.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            choices.append(end | {"stop_reason": step.stop})
        return choices

    def _chunk(
        self, choice: dict[str, Any], with_usage: bool, has_begun: bool, further: dict[str, Any] | None = None
    ) -> bytes:
        chunk = self._envelope("chat.completion.chunk", [choice]) | (further or {})
        chunk["system_fingerprint"] = self._context.fingerprint
        if with_usage:
            options = self._request.stream_options
            chunk["usage"] = self._usage() if options and options.continuous_usage_stats and has_begun else None
        return event(chunk)
