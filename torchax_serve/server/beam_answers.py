"""Answers of a beam search, step by step on the engine, next to other requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence

from torchax_serve.outputs import FinishReason, TokenLogprobs
from torchax_serve.request_params import RequestParams
from torchax_serve.sampling.beam_search import Beam, BeamOptions, BeamSearch
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.scheduler import Request
from torchax_serve.server.answers import Answer, AnswerOptions, answer_detokenizer, prepare
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.merged_answers import merged_steps
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.prompt_limits import check_prompts
from torchax_serve.server.schemas import ChatRequest, TextRequest
from torchax_serve.text.prompt import facts_of
from torchax_serve.text.text_stream import AnswerStep

_WITHOUT: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("stream", "prompt_logprobs", "stop", "bad_words", "allowed_token_ids", "logit_bias"), ()),
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json", "guided_regex"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "logprobs", "top_logprobs", "tools", "suffix"), ()),
    **dict.fromkeys(("min_tokens", "presence_penalty", "frequency_penalty", "min_p"), (0,)),
    "repetition_penalty": (1,),
    "thinking_token_budget": (-1,),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
}
"""Fields that do not go with a beam search, and values of them that ask for nothing."""


def check_beams(request: TextRequest) -> None:
    """Raises ApiError, 400, for fields that only a beam search has, or that it has not."""
    if not request.use_beam_search:
        for name, neutral in (("length_penalty", (1,)), ("early_stopping", (False,))):
            value = getattr(request, name)
            if value is not None and value not in neutral:
                message = f"{name}: expected use_beam_search true with it, got none; leave it out"
                raise bad_request(message, name, "invalid_value")
        return
    for name, values in _WITHOUT.items():
        value = getattr(request, name, None)
        if value is None or value is False or value in ([], {}, "") or value in values:
            continue
        message = (
            f"{name}: expected none next to use_beam_search, whose beams are the likeliest sequences; leave it out"
        )
        raise bad_request(message, name, "unsupported_parameter")


@dataclasses.dataclass
class _Search:
    """A search for the answers to one prompt, which the first of their readers starts."""

    service: ModelService
    prepared: Request
    params: SamplingParams
    options: BeamOptions
    timeout_s: float | None
    first_token_timeout_s: float | None = None
    task: asyncio.Task[list[Beam]] | None = None
    num_cached_tokens: int = 0

    async def beams(self) -> list[Beam]:
        """Returns the ended sequences, best first.

        Raises:
            ApiError: 504 if the time of the request has passed.
        """
        if self.task is None:
            self.task = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.shield(self.task)
        except TimeoutError as error:
            self.cancel()
            raise ApiError(
                504, "expected an answer within the time limit of requests; lower max_tokens or n"
            ) from error

    async def _run(self) -> list[Beam]:
        search = BeamSearch(self.options)
        while not search.is_done:
            prompts = [[*self.prepared.prompt_ids, *beam.token_ids] for beam in search.running]
            is_first = not search.running[0].token_ids
            options = AnswerOptions(first_token_timeout_s=self.first_token_timeout_s if is_first else None)
            answers = await self.service.run(self.service.start, prompts, self.params, options)
            found: list[TokenLogprobs | None] = [None] * len(answers)
            async with contextlib.aclosing(merged_steps(answers)) as batches:
                async for batch in batches:
                    for answer, step in batch:
                        found[_place(answers, answer)] = (step.logprobs or (None,))[0]
            self.num_cached_tokens = self.num_cached_tokens or answers[0].num_cached_tokens
            search.advance([each.top for each in found if each is not None])
        return search.ended

    def cancel(self) -> None:
        """Ends the search."""
        if self.task is not None:
            self.task.cancel()


def _place(answers: Sequence[Answer], answer: Answer) -> int:
    return next(index for index, each in enumerate(answers) if each is answer)


class BeamAnswer(Answer):
    """One of the best sequences of a search, with all of its tokens in one step."""

    def __init__(self, index: int, rank: int, search: _Search, options: AnswerOptions) -> None:
        self.index, self._rank, self._search = index, rank, search
        self.prompt_ids, self.submitted_s = search.prepared.prompt_ids, time.monotonic()
        self.num_tokens, self.prompt_logprobs, self.finish_reason, self.on_tokens = 0, None, None, None
        self.first_s = self.last_s = self.previous_s = None
        self._detokenizer = answer_detokenizer(search.service.model, search.prepared, options)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache."""
        return self._search.num_cached_tokens

    @property
    def started_s(self) -> float | None:
        """None: its steps wait one by one."""
        return None

    def cancel(self) -> None:
        """Ends the search."""
        self._search.cancel()

    async def __aiter__(self) -> AsyncGenerator[AnswerStep]:
        """Yields the only step."""
        try:
            beams = await self._search.beams()
        except asyncio.CancelledError:  # the client has gone
            self._search.cancel()
            raise
        beam = beams[min(self._rank, len(beams) - 1)]
        has_ended = beam.token_ids and beam.token_ids[-1] in self._search.prepared.params.stop_ids
        reason: FinishReason = "stop" if has_ended else "length"
        step = self._detokenizer.push(beam.token_ids, None, reason)
        self._record(step)
        yield step


def beam_answers(
    service: ModelService,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    request: TextRequest,
    options: AnswerOptions,
    *,
    has_media: bool = False,
) -> list[Answer]:
    """Returns the answers of a beam search for each prompt: its best sequences.

    Args:
        service: The model.
        prompts: Token ids of the prompts.
        params: Sampling parameters of the request, which asks for a search.
        request: The request.
        options: How answers are decoded.
        has_media: Whether the prompt has images or audio.

    Raises:
        ApiError: 400 for a search that the model or the server does not have.
    """
    num_answers = request.n or 1
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    num_beams = max(num_answers, request.best_of or 1)
    counted = "n" if num_beams == num_answers else "best_of"
    check_prompts(service, prompts, num_beams, params.max_new_tokens, field, counted=counted)
    if has_media or facts_of(service.model).has_encoder:
        got = "images, videos or audio" if has_media else "an encoder-decoder model"
        raise _not_served(f"use_beam_search: expected a prompt of text for a decoder, got {got}")
    found: list[Answer] = []
    for prompt in prompts:
        one = dataclasses.replace(options, num_answers=1)
        (prepared,) = prepare(service.model, prompt, dataclasses.replace(params, temperature=0.0), one)
        beams = BeamOptions(
            num_beams,
            prepared.max_new_tokens,
            frozenset(params.stop_token_ids or ()) if request.ignore_eos else frozenset(prepared.params.stop_ids),
            1.0 if request.length_penalty is None else request.length_penalty,
            request.early_stopping or False,
        )
        _check(service, prepared, beams)
        step = SamplingParams(
            max_new_tokens=1,
            temperature=0.0,
            logprobs=min(beams.num_candidates, service.model.engine.vocab_size),
            priority=params.priority,
            cache_salt=params.cache_salt,
            adapter=params.adapter,
            queue_timeout_s=params.queue_timeout_s,
        )
        search = _Search(service, prepared, step, beams, params.timeout_s, options.first_token_timeout_s)
        found += [BeamAnswer(len(found) + rank, rank, search, options) for rank in range(num_answers)]
    return found


def _check(service: ModelService, prepared: Request, beams: BeamOptions) -> None:
    """Raises ApiError, 400, where the beams would not be those of the model's log-probabilities."""
    engine = service.model.engine
    row = RequestParams.of_generation_config(prepared.params.config)
    row.check_tokens(engine.vocab_size)
    if row.level != "greedy":
        raise _not_served(
            "use_beam_search: expected a generation config that changes no log-probabilities, got one that does, "
            "such as by repetition_penalty"
        )
    most = engine.vocab_size if engine.max_logprobs == -1 else engine.max_logprobs
    if beams.num_candidates > most:
        limit = max(0, most - len(beams.eos_token_ids))
        allowed = f"at most {limit} beams, whose next tokens --max-logprobs allows"
        message = f"n: expected {allowed}, got {beams.num_beams}"
        raise bad_request(message, "n", "invalid_value")


def _not_served(message: str) -> ApiError:
    return bad_request(f"{message}; leave it out", "use_beam_search", "unsupported_parameter")
