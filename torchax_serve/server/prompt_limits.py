"""Limits of prompts: number, characters and tokens, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.request_checks import check_text_size
from torchax_serve.text.prompt import facts_of


class LimitedModel(Protocol):
    """The part of `torchax_serve.server.model_service.ModelService` that limits prompts."""

    model: Any
    options: Any

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer; None without a limit."""

    @property
    def token_bytes(self) -> Any:
        """Bytes of the tokenizer's tokens."""


PIECE_CHARS, PIECE_SLACK = 1 << 18, 16
"""Characters of a long text that are tokenized at once, and tokens that its ends may add."""


def check_prompts(
    service: LimitedModel,
    prompts: Sequence[Sequence[int]],
    num_answers: int,
    max_new_tokens: int | None,
    field: str,
    *,
    counted: str = "n",
) -> None:
    """Raises ApiError, 400, for too many answers, or prompts and answers that are too long.

    Args:
        service: The model.
        prompts: Token ids of the prompts.
        num_answers: Answers to each.
        max_new_tokens: Most tokens of an answer; None as the model's config says.
        field: The field of the request that has the prompts.
        counted: The field that asks for so many answers.
    """
    most = service.options.request.max_answers
    if len(prompts) * num_answers > most:
        got = len(prompts) * num_answers
        message = f"{counted}: expected at most {most} answers to all prompts together, got {got}"
        raise bad_request(message, counted, "invalid_value")
    for prompt in prompts:
        if not facts_of(service.model).has_encoder:
            _check_length(len(prompt), max_new_tokens, service.max_model_len, field)


def check_len(service: LimitedModel, texts: Sequence[str], field: str, *, is_cut: bool) -> None:
    """Raises ApiError, 400, for long texts of more tokens than the model allows.

    Those that will be cut may be as long as texts that are tokenized only.

    Tokenizing a text of megabytes takes seconds and hundreds of megabytes, and the list of its tokens holds Python's
    lock. A text with more characters than so many tokens can have is not tokenized, another long one in pieces.
    """
    if is_cut:
        check_text_size("".join(texts), service.options.request, field)
        return
    limit, tokenizer = service.max_model_len, service.model.text_tokenizer
    if limit is None or tokenizer is None:
        return
    num_chars, most = sum(map(len, texts)), service.token_bytes.max_token_chars
    if num_chars > limit * most:
        raise _too_long(f"{limit} tokens of at most {most} characters", f"{num_chars} characters", field)
    if num_chars <= 4 * PIECE_CHARS:
        return
    pieces = (text[begin : begin + PIECE_CHARS] for text in texts for begin in range(0, len(text), PIECE_CHARS))
    num_tokens = 0
    for piece in pieces:
        num_tokens += len(tokenizer(piece, add_special_tokens=False)["input_ids"])
        num_tokens -= PIECE_SLACK  # a word that is cut has more tokens
        if num_tokens > limit:
            raise _too_long(f"{limit} tokens", "more", field)


def _too_long(limit: str, got: str, field: str) -> ApiError:
    message = f"This model's maximum context length is {limit}, and the prompt has {got}; shorten it"
    return bad_request(message, field, "context_length_exceeded")


def _check_length(prompt_len: int, max_new_tokens: int | None, limit: int | None, field: str) -> None:
    if limit is not None and prompt_len + (max_new_tokens or 1) > limit:
        asked = "" if max_new_tokens is None else f" and {max_new_tokens} of the answer"
        raise bad_request(
            f"This model's maximum context length is {limit} tokens, and the request has {prompt_len} tokens of "
            f"the prompt{asked}; shorten the prompt or lower max_tokens",
            field,
            "context_length_exceeded",
        )
