"""Answers to prompts, as steps in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any

from torchax_serve.engine.request_handle import RequestHandle, RequestOutput, cancel_on_error
from torchax_serve.outputs import FinishReason, TokenLogprobs
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.scheduler import Request
from torchax_serve.server.errors import ApiError
from torchax_serve.text.detokenizer import Detokenizer, NoText
from torchax_serve.text.generate_batch import split_answers
from torchax_serve.text.prompt import TextModel, make_media_request, make_request
from torchax_serve.text.text_stream import AnswerDetokenizer, AnswerStep, submit_answer, submitted_together


class Answer:
    """One answer, from its submission on. Iterate over it once, with ``async for``.

    Leaving the loop ends the request.

    Attributes:
        index: Number of the answer among those of its HTTP request.
        prompt_ids: Token ids of its prompt.
        num_tokens: New tokens so far.
        prompt_logprobs: Those of the prompt's tokens, None for the first one; with the first step, if requested.
        finish_reason: Why it ended; None while it runs.
        on_tokens: Called with the number of new tokens of each step, or None.
        submitted_s, first_s, previous_s, last_s: Seconds on the clock `time.monotonic`: of submission, of the first
            step, of the one before the last and of the last; None before there is one.
    """

    def __init__(
        self,
        index: int,
        prepared: Request,
        handle: RequestHandle,
        detokenizer: AnswerDetokenizer,
        first_token_timeout_s: float | None = None,
    ) -> None:
        self.index = index
        self.prompt_ids = prepared.prompt_ids
        self.num_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.finish_reason: FinishReason | None = None
        self.on_tokens: Callable[[int], None] | None = None
        self.submitted_s = handle.submitted_s
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.previous_s: float | None = None
        self._handle, self._detokenizer, self._first_token_timeout_s = handle, detokenizer, first_token_timeout_s

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache."""
        return self._handle.num_cached_tokens

    @property
    def started_s(self) -> float | None:
        """When the engine began with it, in seconds as `submitted_s`; None while it waits."""
        state = self._handle.state
        return None if state is None else state.started_s

    def cancel(self) -> None:
        """Ends the request, whether or not it is being iterated over."""
        self._handle.cancel()

    async def __aiter__(self) -> AsyncGenerator[AnswerStep]:
        """Yields the steps; the last one has a finish reason.

        Raises:
            RequestError: The request failed.
            ApiError: 504 if the time for its first token has passed.
        """
        outputs: Any = aiter(self._handle)
        async with contextlib.aclosing(outputs):
            output = await self._first(outputs)
            while output is not None:
                self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
                step = self._detokenizer.push(output.token_ids, output.logprobs, output.finish_reason)
                if step.finish_reason == "stop" and output.finish_reason is None:
                    self._handle.cancel("stop")  # at a stop string, which the engine does not see
                self._record(step)
                yield step
                if step.finish_reason is not None:
                    return
                output = await anext(outputs, None)

    async def _first(self, outputs: AsyncGenerator[RequestOutput]) -> RequestOutput | None:
        """Returns the first output, which has to come in time."""
        if self._first_token_timeout_s is None:
            return await anext(outputs, None)
        rest_s = self.submitted_s + self._first_token_timeout_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, rest_s)):
                return await anext(outputs, None)
        except TimeoutError as error:
            raise ApiError(
                504,
                "expected the first token within its time limit, which has passed; send the request again later",
                code="first_token_deadline_exceeded",
            ) from error

    def _record(self, step: AnswerStep) -> None:
        self.previous_s, self.last_s = self.last_s, time.monotonic()
        if self.first_s is None:
            self.first_s = self.last_s
        self.num_tokens += len(step.token_ids)
        if self.on_tokens is not None:
            self.on_tokens(len(step.token_ids))
        self.finish_reason = step.finish_reason


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """How answers are decoded, apart from their sampling.

    Attributes:
        num_answers: Answers to each prompt.
        skip_special_tokens: Whether texts leave special tokens out.
        include_stop: Whether texts have the stop string.
        is_parsed: Whether texts are parsed: special tokens are part of them, those that end an answer are not.
        silent_ids: Further special tokens that are no part of parsed texts.
        default_max_new_tokens: Most tokens where neither the request nor the model says.
        first_token_timeout_s: Seconds until the first token of each answer; None for any time.
    """

    num_answers: int = 1
    skip_special_tokens: bool = True
    include_stop: bool = False
    is_parsed: bool = False
    silent_ids: Collection[int] = ()
    default_max_new_tokens: int = 16
    first_token_timeout_s: float | None = None


def prepare(
    model: TextModel, prompt_ids: Sequence[int], params: SamplingParams, options: AnswerOptions
) -> list[Request]:
    """Returns a checked request for each answer to one prompt.

    Answer i samples with ``seed + i``.
    """
    prepared = make_request(model, prompt_ids, params, default_max_new_tokens=options.default_max_new_tokens)
    return split_answers(prepared, options.num_answers)


def prepare_media(
    model: TextModel, inputs: Mapping[str, Any], params: SamplingParams, options: AnswerOptions
) -> list[Request]:
    """As `prepare`, of a conversation with images or audio: all arguments of ``generate``."""
    return split_answers(make_media_request(model, inputs, params), options.num_answers)


def submit(model: TextModel, prepared: Sequence[Request], options: AnswerOptions) -> list[Answer]:
    """Submits requests.

    On an error none is submitted. They enter the engine together; answers to one prompt share its pages.

    Raises:
        QueueFullError: Too many requests are waiting.
        TorchaxServeError: One cannot run.
    """
    handles: list[RequestHandle] = []
    answers: list[Answer] = []
    first: RequestHandle | None = None  # of the first answer to the prompt
    with cancel_on_error(handles), submitted_together(model, len(prepared)):
        for index, request in enumerate(prepared):
            handle = submit_answer(model, request, first)
            first = first if request.answer_index else handle
            handles.append(handle)
            detokenizer = answer_detokenizer(model, request, options)
            answers.append(Answer(index, request, handle, detokenizer, options.first_token_timeout_s))
    return answers


def answer_detokenizer(model: TextModel, request: Request, options: AnswerOptions) -> AnswerDetokenizer:
    """Returns the detokenizer of one answer, with its stop strings."""
    tokenizer = model.text_tokenizer
    if tokenizer is None:
        detokenizer: Detokenizer | NoText = NoText()
    else:
        skips = options.skip_special_tokens and not options.is_parsed
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips)
    return AnswerDetokenizer(
        detokenizer,
        request.params.stop_strings,
        request.params.given.stop_token_ids or (),
        include_stop=options.include_stop,
        silent_ids={*request.params.stop_ids, *options.silent_ids} if options.is_parsed else (),
        min_tokens=request.params.min_new_tokens,
    )
