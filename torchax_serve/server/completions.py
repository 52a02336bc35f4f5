"""``/v1/completions``."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from torchax_serve.outputs import TokenLogprobs
from torchax_serve.server.answers import Answer, AnswerOptions
from torchax_serve.server.beam_answers import beam_answers, check_beams
from torchax_serve.server.context import ServerContext, context_of, follow
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.fim_prompts import prompts_with_gap
from torchax_serve.server.formats import NOT_GIVEN, LogprobFormat, finish_reason_of, usage_of
from torchax_serve.server.merged_answers import merged_steps
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.request_checks import check_counts, truncated
from torchax_serve.server.sampling import renamed_error, sampling_params
from torchax_serve.server.schemas import CompletionRequest
from torchax_serve.server.sse import DONE, EventStream, event, until_disconnect
from torchax_serve.server.structured import grammar_of, masks_of
from torchax_serve.server.thinking_budget import PROMPT_END_TOKENS, asked_budget, text_of_tokens, with_budget
from torchax_serve.server.tools import reasoning_end
from torchax_serve.text.text_stream import AnswerStep

DEFAULT_MAX_TOKENS = 16
"""Most tokens of a plain completion without `max_tokens`, as in OpenAI's interface."""


async def completions(request: Request) -> Any:
    """Continues prompts."""
    context = context_of(request)
    service, body = await read_for_model(request, CompletionRequest, "generate")
    prompts, answers = await start_completions(request, service, body)
    completion = TextCompletion(context, service, body, prompts, answers)
    if body.stream:
        return EventStream(completion.events(), context.options.keep_alive_s)
    return JSONResponse(await until_disconnect(request.receive, completion.complete()))


async def start_completions(
    request: Request, service: ModelService, body: CompletionRequest
) -> tuple[list[list[int]], list[Answer]]:
    """Checks a request and submits its answers; returns them and the prompts' token ids.

    Raises:
        ApiError: The request is not valid, or cannot run.
        ClientDisconnect: The client has gone.
    """
    context = context_of(request)
    service.settle_name(body, request.state.key, may_be_adapter=True)
    check_counts(body, context.options.request)
    check_beams(body)
    num_prompts = len(body.prompts())
    if not 1 <= num_prompts <= context.options.request.max_answers:
        raise bad_request(
            f"prompt: expected 1 to {context.options.request.max_answers} prompts, got {num_prompts}",
            "prompt",
            "invalid_value",
        )
    if body.max_tokens is not None and body.max_tokens < (0 if body.echo else 1):
        raise bad_request("max_tokens: expected at least 1, or echo true with 0", "max_tokens", "invalid_value")
    try:
        work = service.run(_start, context, service, body, request.state.key_name)
        prompts, answers = await until_disconnect(request.receive, work)
    except ValueError as error:
        raise renamed_error(error, body) from error
    follow(request, body, answers)
    return prompts, answers


def _start(
    context: ServerContext, service: ModelService, body: CompletionRequest, key_name: str | None
) -> tuple[list[list[int]], list[Answer]]:
    """Returns the token ids of the prompts, and their answers."""
    params = sampling_params(
        _with_prompt_logprobs(body),
        service,
        context.options,
        key_name,
        max_new_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
    )
    if body.suffix:
        prompts, ends = prompts_with_gap(service, body, body.suffix)
        params = dataclasses.replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *ends] or None)
    else:
        prompts = [
            truncated(_prompt_ids(service, body, index, prompt), body, service.max_model_len, params.max_new_tokens)
            for index, prompt in enumerate(body.prompts())
        ]
    family, grammar = service.family, grammar_of(body, context.options.request)

    def prompt_end(prompt_ids: Sequence[int]) -> str:
        return text_of_tokens(service, prompt_ids[-PROMPT_END_TOKENS:])

    def after(prompt_ids: Sequence[int]) -> Callable[[Sequence[int]], int | None] | None:
        if family is None:
            return None
        return reasoning_end(family, prompt_end(prompt_ids), lambda ids: text_of_tokens(service, ids))

    held = masks_of(lambda: service.grammars, grammar, after)
    masks = with_budget(service, family, asked_budget(body), params.max_new_tokens, prompt_end, held)
    options = AnswerOptions(
        num_answers=body.n or 1,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
        default_max_new_tokens=DEFAULT_MAX_TOKENS,
        first_token_timeout_s=context.options.first_token_timeout_s,
    )
    if body.use_beam_search:
        return prompts, beam_answers(service, prompts, params, body, options)
    return prompts, service.start(prompts, params, options, masks)


def _prompt_ids(service: ModelService, body: CompletionRequest, index: int, prompt: str | Sequence[int]) -> list[int]:
    try:
        return service.plain_prompt(prompt, is_cut=body.truncate_prompt_tokens is not None)
    except ApiError:
        raise
    except ValueError as error:
        raise bad_request(
            f"prompt[{index}]: {str(error).removeprefix('prompt: ')}", "prompt", "invalid_value"
        ) from error


def _with_prompt_logprobs(body: CompletionRequest) -> CompletionRequest:
    """Returns the request, with the prompt's log-probabilities where an echo needs them."""
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        return body.model_copy(update={"prompt_logprobs": body.logprobs})
    return body


class TextCompletion:
    """A plain completion, streamed or complete."""

    def __init__(
        self,
        context: ServerContext,
        service: ModelService,
        request: CompletionRequest,
        prompts: list[list[int]],
        answers: list[Answer],
    ) -> None:
        self._context, self._service = context, service
        self._request, self._prompts, self._answers = request, prompts, answers
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._format = LogprobFormat(service.token_bytes, as_ids=bool(request.return_tokens_as_token_ids))
        self._offsets = [0] * len(answers)  # of the next token in the text, by answer
        hidden = service.special_ids.values() if request.skip_special_tokens is not False else ()
        self._hidden = frozenset(hidden) | frozenset(request.stop_token_ids or ())

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._request.model,
            "system_fingerprint": self._service.fingerprint,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._answers, sum(len(prompt) for prompt in self._prompts))
        if self._request.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    async def complete(self) -> dict[str, Any]:
        """Returns the body of the complete answer."""
        parts: list[list[AnswerStep]] = [[] for _ in self._answers]
        async with contextlib.aclosing(merged_steps(self._answers)) as batches:
            async for batch in batches:
                for answer, step in batch:
                    parts[answer.index].append(step)
                    self._context.metrics.step(answer, step)
        choices = [
            self._choice(answer, parts[answer.index], with_prompt=bool(self._request.echo)) for answer in self._answers
        ]
        return self._envelope(choices) | {"service_tier": None, "usage": self._usage(), **NOT_GIVEN}

    def _prompt_text(self, answer: Answer) -> str:
        """Returns the text of an answer's prompt, as it was given if it was text."""
        index = answer.index // (self._request.n or 1)
        prompt = self._request.prompts()[index]
        if isinstance(prompt, str) and self._request.truncate_prompt_tokens is None:
            return prompt
        return "".join(self._format.text(token_id) for token_id in answer.prompt_ids)

    def _choice(self, answer: Answer, steps: list[AnswerStep], *, with_prompt: bool) -> dict[str, Any]:
        if self._request.max_tokens == 0:  # one token was computed for the prompt's log-probabilities
            steps = [AnswerStep("", (), (), step.finish_reason and "length") for step in steps]
        text = "".join(step.text for step in steps)
        shown = (self._prompt_text(answer) if with_prompt else "") + text
        choice: dict[str, Any] = {
            "index": answer.index,
            "text": shown,
            "logprobs": self._logprobs(answer, steps, with_prompt),
            "finish_reason": finish_reason_of(steps[-1].finish_reason),
            "stop_reason": steps[-1].stop,
            "token_ids": None,
            "prompt_token_ids": None,
        }
        if not self._request.stream:
            choice |= {"prompt_logprobs": None, "routed_experts": None}
        if self._request.return_token_ids:
            choice["token_ids"] = [token_id for step in steps for token_id in step.token_ids]
        if with_prompt or steps[-1].finish_reason is not None or not self._request.stream:
            choice |= self._prompt_fields(answer)
        return choice

    def _prompt_fields(self, answer: Answer) -> dict[str, Any]:
        """Returns vLLM's fields about the prompt, as far as they were requested."""
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = list(answer.prompt_ids)
        if self._request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._format.prompt(answer.prompt_logprobs or ())
        return fields

    def _logprobs(self, answer: Answer, steps: list[AnswerStep], with_prompt: bool) -> dict[str, Any] | None:
        num_top = self._request.num_top
        if num_top is None:
            return None
        found: list[TokenLogprobs | None] = list(answer.prompt_logprobs or ()) if with_prompt else []
        ids = list(answer.prompt_ids) if with_prompt else []
        offsets = self._format.offsets_in(self._prompt_text(answer), ids) if with_prompt else []
        begin = len(self._prompt_text(answer)) if with_prompt else self._offsets[answer.index]
        found += [each for step in steps for each in step.logprobs or ()]
        new = [token_id for step in steps for token_id in step.token_ids]
        behind, self._offsets[answer.index] = self._format.offsets(new, begin, self._hidden)
        return self._format.completion(found, ids + new, num_top, [*offsets, *behind])

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the events of a streamed answer; those of one step are one piece."""
        options = self._request.stream_options
        opened: set[int] = set()
        async with contextlib.aclosing(merged_steps(self._answers)) as batches:
            async for batch in batches:
                pieces = []
                for answer, step in batch:
                    self._context.metrics.step(answer, step)
                    with_prompt = bool(self._request.echo) and answer.index not in opened
                    opened.add(answer.index)
                    is_silent = not (step.text or step.logprobs or self._request.return_token_ids or with_prompt)
                    if is_silent and step.finish_reason is None:
                        continue
                    chunk = self._envelope([self._choice(answer, [step], with_prompt=with_prompt)])
                    if options and options.continuous_usage_stats:
                        chunk["usage"] = self._usage()
                    elif options and options.include_usage:
                        chunk["usage"] = None
                    pieces.append(event(chunk))
                if pieces:
                    yield b"".join(pieces)
        if options and options.include_usage:
            yield event(self._envelope([]) | {"usage": self._usage()})
        yield DONE
