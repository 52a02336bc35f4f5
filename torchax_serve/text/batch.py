"""Many prompts at once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from model_adapters.errors import InvalidArgumentError
from torchax_serve.request import MAX_SEED, SamplingParams
from torchax_serve.text.detokenizer import Detokenizer
from torchax_serve.text.prompt import Request, TextModel, encode_prompt, make_request, need_tokenizer
from torchax_serve.text.stream import TextStream, new_tokens

if TYPE_CHECKING:
    from transformers import GenerationConfig

MAX_BATCH = 32
# Prompts of one batch are padded to the longest; beyond this ratio the padding costs more than a batch of its own.
_MAX_PADDING_RATIO = 2


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        text: without special tokens, up to the first stop string.
        token_ids: the new tokens, the end-of-sequence token included.
        prompt_len: tokens of the prompt.
        finish_reason: "stop" (end-of-sequence token or stop string) or "length".
    """

    text: str
    token_ids: list[int]
    prompt_len: int
    finish_reason: Literal["stop", "length"]


def generate_batch(
    model: TextModel, prompts: Sequence[str | Sequence[int]], params: SamplingParams | None = None
) -> list[Completion]:
    """Continues every prompt; the completions stand in the order of the prompts.

    With ``n`` answers to a prompt they stand one after the other. With a ``seed`` each prompt is decoded by itself, so
    its tokens do not depend on what else is in the batch; the i-th answer to a prompt draws from ``seed + i``.

    Args:
        model: the model.
        prompts: texts or token ids, mixed as you like.
        params: how to decode, for all of them; as in `torchax_serve.text.stream.stream`.

    Raises:
        InvalidArgumentError: `prompts` is one string, or one of them is empty, too long or out of range (the message
            says which).
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise InvalidArgumentError(
            f"prompts: expected a list of prompts, got {type(prompts).__name__}; put it in a list"
        )
    need_tokenizer(model)
    requests = [_numbered_request(model, index, prompt, params) for index, prompt in enumerate(prompts)]
    if params is not None and params.seed is not None:
        return [completion for request in requests for completion in _seeded(model, request)]
    answers: dict[int, list[Completion]] = {}
    for group in _groups(requests):
        answers.update(zip(group, _one_batch(model, [requests[index] for index in group]), strict=True))
    return [completion for index in range(len(requests)) for completion in answers[index]]


def _numbered_request(
    model: TextModel, index: int, prompt: str | Sequence[int], params: SamplingParams | None
) -> Request:
    try:
        return make_request(model, encode_prompt(model, prompt), params)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"prompts[{index}]: {error}") from error


def _groups(requests: Sequence[Request]) -> list[list[int]]:
    """Indices of the requests that are decoded together: similar lengths, at most `MAX_BATCH`."""
    groups: list[list[int]] = []
    for index in sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids)):
        group = groups[-1] if groups else []
        shortest = len(requests[group[0]].prompt_ids) if group else 0
        fits = len(requests[index].prompt_ids) <= _MAX_PADDING_RATIO * shortest
        # Where nobody set a length, the room behind the prompt does, and it may differ.
        same = bool(group) and _lengths(requests[group[0]]) == _lengths(requests[index])
        if group and fits and same and len(group) < MAX_BATCH:
            group.append(index)
        else:
            groups.append([index])
    return groups


def _lengths(request: Request) -> tuple[int | None, int | None, int]:
    """What limits the answer; a ``max_length`` counts the prompt, so it holds for prompts of one length only."""
    config = request.generation_config
    by_total = config.max_new_tokens is None
    return config.max_new_tokens, config.max_length, len(request.prompt_ids) if by_total else 0


def _one_batch(model: TextModel, requests: Sequence[Request]) -> list[list[Completion]]:
    """The completions of each request, from one call of the core's ``generate`` on left-padded rows."""
    import torch

    config = copy.deepcopy(requests[0].generation_config)
    config.stop_strings = list(requests[0].stop_strings) or None
    if config.pad_token_id is None:
        config.pad_token_id = next(iter(requests[0].eos_token_ids), 0)
    longest = max(len(request.prompt_ids) for request in requests)
    input_ids = torch.full((len(requests), longest), config.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, request in enumerate(requests):
        input_ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        attention_mask[row, longest - len(request.prompt_ids) :] = 1
    needs_tokenizer = {"tokenizer": model.tokenizer} if config.stop_strings else {}
    output = model.generate(
        input_ids=input_ids, attention_mask=attention_mask, generation_config=config, **needs_tokenizer
    )
    rows: list[list[int]] = (output if isinstance(output, torch.Tensor) else output.sequences)[:, longest:].tolist()
    limit = (config.max_length or 0) - longest if config.max_new_tokens is None else config.max_new_tokens
    num_answers = len(rows) // len(requests)  # n answers to a prompt come as n rows, one after the other
    completions: list[list[Completion]] = []
    for i, request in enumerate(requests):
        answers = [(row, _completion(model, request, row)) for row in rows[i * num_answers : (i + 1) * num_answers]]
        completions.append(
            [
                _alone(model, request) if _ended_too_soon(completion, row, limit, config) else completion
                for row, completion in answers
            ]
        )
    return completions


def _ended_too_soon(completion: Completion, row: Sequence[int], limit: int, config: GenerationConfig) -> bool:
    """Whether ``generate`` ended a row for a stop string that begins in the prompt, where it belongs to no answer."""
    if not config.stop_strings or completion.finish_reason == "stop":
        return False
    return len(row) < limit or row[-1] == config.pad_token_id


def _alone(model: TextModel, request: Request) -> Completion:
    """The completion of one request decoded by itself."""
    config = copy.deepcopy(request.generation_config)
    config.num_return_sequences = None
    request = dataclasses.replace(request, generation_config=config)
    return _completed(TextStream(request, Detokenizer(model.tokenizer), new_tokens(model, request)))


def _seeded(model: TextModel, request: Request) -> list[Completion]:
    num_answers = request.generation_config.num_return_sequences or 1
    seeds = [((request.seed or 0) + index) % (MAX_SEED + 1) for index in range(num_answers)]
    return [_alone(model, dataclasses.replace(request, seed=seed)) for seed in seeds]


def _completion(model: TextModel, request: Request, row: Sequence[int]) -> Completion:
    """Reads a row up to its end-of-sequence token or stop string; what follows is padding."""
    return _completed(TextStream(request, Detokenizer(model.tokenizer), iter(row)))


def _completed(answer: TextStream) -> Completion:
    text = "".join(answer)
    stats = answer.stats
    reason: Literal["stop", "length"] = "stop" if stats.finish_reason == "stop" else "length"
    return Completion(text, answer.token_ids, stats.prompt_tokens, reason)
