"""`generate_batch`: completions of many prompts."""

from __future__ import annotations

import collections
import copy
import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from model_adapters.errors import InvalidArgumentError, QueueFullError
from torchax_serve.outputs import Completion
from torchax_serve.sampling_params import MAX_SEED, SamplingParams
from torchax_serve.scheduler.request import Request
from torchax_serve.text.call_hints import refuses_unknown_options
from torchax_serve.text.detokenizer import Detokenizer, NoText
from torchax_serve.text.prompt import TextModel, detokenizer_of, encode_prompt, make_request
from torchax_serve.text.text_stream import TextStream, submit_answer, submitted_together
from torchax_serve.validation.argument_checks import is_list


@refuses_unknown_options
def generate_batch(
    model: TextModel,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
) -> list[Completion]:
    """Continues every prompt; returns the completions in the order of the prompts.

    All requests are submitted before the first answer is read. On the engine they share a batch, and each gets the
    tokens it gets by itself. Requests for which the queue has no room are submitted as others finish. ``n`` answers to
    a prompt follow each other and share its pages; with a ``seed`` answer i of them samples with ``seed + i``.

    Args:
        model: the model.
        prompts: texts or lists of token ids.
        params: sampling parameters of all prompts, or a list with one per prompt; as in
            `torchax_serve.text.text_stream.stream`.

    Raises:
        InvalidArgumentError: `prompts` is one string, or one of them is empty, too long or out of range (the message
            says which).
        UnsupportedArgumentError: an unknown argument.
        RequestError: a request failed; the requests after it are cancelled.
        QueueFullError: requests of other callers fill the queue.
    """
    if not is_list(prompts):
        raise InvalidArgumentError(
            f"prompts: expected a list of prompts, got {type(prompts).__name__}; put it in a list"
        )
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise InvalidArgumentError(f"params: expected one for each of {len(prompts)} prompts, got {len(each)}")
    requests = [
        _numbered_request(model, index, prompt, own_params)
        for index, (prompt, own_params) in enumerate(zip(prompts, each, strict=True))
    ]
    return complete_all(model, [split_answers(request, request.params.num_answers) for request in requests])


def complete_all(model: TextModel, answers: Sequence[Sequence[Request]]) -> list[Completion]:
    """Returns the completions of requests in their order.

    Args:
        model: The model.
        answers: Requests for each prompt, numbered by their `answer_index`; they share its pages.

    Raises:
        RequestError: a request failed; the requests after it are cancelled.
        QueueFullError: requests of other callers fill the queue.
    """
    waiting = collections.deque(
        _Answers(collections.deque((answer, detokenizer_of(model, answer.params.stop_strings)) for answer in one))
        for one in answers
    )
    pending: collections.deque[TextStream] = collections.deque()
    completions: list[Completion] = []
    try:
        while waiting or pending:
            _submit(model, waiting, pending)
            completions.append(_completed(pending.popleft()))
        return completions
    finally:
        for stream in pending:
            stream.close()  # left over if an earlier one failed


@dataclasses.dataclass
class _Answers:
    """Answers to a prompt that have not been submitted."""

    left: collections.deque[tuple[Request, Detokenizer | NoText]]
    first: Any = None  # handle of the first answer; None: it is among them


def _submit(model: TextModel, waiting: collections.deque[_Answers], pending: collections.deque[TextStream]) -> None:
    """Moves answers from `waiting` to `pending`, as many as the queue has room for.

    They enter together, so that prompts can share steps from the first one on.

    Args:
        model: The model.
        waiting: Those that have not been submitted, by prompt.
        pending: Those that have.

    Raises:
        QueueFullError: the queue has no room, and nothing is pending.
    """
    is_shared = any(len(one.left) > 1 for one in waiting) or vars(model).get("_engine") is not None
    together = sum(len(one.left) for one in waiting) if is_shared else 1  # beam search needs no engine
    with submitted_together(model, together):
        while waiting:
            one = waiting[0]
            while one.left:
                request, detokenizer = one.left[0]
                try:
                    handle = submit_answer(model, request, one.first)
                except QueueFullError:
                    if not pending:
                        raise
                    return
                one.left.popleft()
                pending.append(TextStream(request, detokenizer, handle))
                one.first = handle if one.first is None else one.first
            waiting.popleft()


def _numbered_request(
    model: TextModel, index: int, prompt: str | Sequence[int], params: SamplingParams | None
) -> Request:
    try:
        return make_request(model, encode_prompt(model, prompt), params)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"prompts[{index}]: {error}") from error


def split_answers(request: Request, num_answers: int) -> list[Request]:
    """Returns one request per answer; answer i samples with ``seed + i``."""
    if num_answers == 1:
        return [request]
    params = request.params
    config = copy.copy(params.config)
    config.num_return_sequences = None
    seed = secrets.randbits(63) if params.seed is None else params.seed
    each = [
        dataclasses.replace(params, config=config, seed=(seed + index) % (MAX_SEED + 1), num_answers=1)
        for index in range(num_answers)
    ]
    return [dataclasses.replace(request, params=own, answer_index=index) for index, own in enumerate(each)]


def _completed(answer: TextStream) -> Completion:
    with answer:
        text = "".join(answer)
    stats = answer.stats
    assert stats.finish_reason is not None
    logprobs = answer.logprobs if answer.logprobs else None
    return Completion(
        text, answer.token_ids, stats.prompt_tokens, stats.finish_reason, logprobs, answer.prompt_logprobs
    )
