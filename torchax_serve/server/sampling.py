"""Sampling fields of a request as `SamplingParams`; errors name the field of the request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.sampling_params import MAX_SEED, SamplingParams
from torchax_serve.server.errors import bad_request, in_words_of_requests
from torchax_serve.server.model_service import ModelService, adapter_of, scoped_salt
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.schemas import ChatRequest, TextRequest
from torchax_serve.validation.argument_checks import short_repr

MAX_BAD_WORDS = 256
"""Most texts of `bad_words`."""
MAX_BAD_WORD_CHARS = 1024
"""Longest of them, in characters."""
MAX_SALT_CHARS = 1024
"""Longest `cache_salt`, in characters."""
_SAME_NAME = (
    "stop_token_ids",
    "ignore_eos",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "prompt_logprobs",
    "priority",
)
_RENAMED: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words",
}
_LOWEST: Mapping[str, tuple[str, int, str]] = {
    "temperature": ("a number", 0, "0 is greedy"),
    "top_k": ("a whole number", -1, "0 and -1 switch it off"),
}
"""Kind, smallest value and remedy of fields that take more than the parameters of their names."""


def sampling_params(
    request: TextRequest,
    service: ModelService,
    limits: ServerOptions,
    key_name: str | None,
    *,
    max_new_tokens: int | None,
) -> SamplingParams:
    """Returns the sampling parameters of a request, for one answer.

    Args:
        request: Its fields.
        service: The model, or the one whose adapter the request names.
        limits: Options of the server, of which those about time are read.
        key_name: Name of the API key, whose cached prefixes are its own.
        max_new_tokens: Most tokens of the answer; None follows the model's generation config.

    Raises:
        ApiError: 400 for a value out of its range.
    """
    if request.allowed_token_ids == []:
        message = "allowed_token_ids: expected at least one token id, or none of the field, got an empty list"
        raise bad_request(message, "allowed_token_ids", "invalid_value")
    if request.cache_salt is not None and len(request.cache_salt) > MAX_SALT_CHARS:
        message = f"cache_salt: expected at most {MAX_SALT_CHARS} characters, got {len(request.cache_salt)}"
        raise bad_request(message, "cache_salt", "invalid_value")
    _check_lowest(request)
    options: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    options |= {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": request.min_tokens,
        "top_k": 0 if request.top_k == -1 else request.top_k,
        "logit_bias": _logit_bias(request.logit_bias),
        "bad_words_ids": _bad_words(request.bad_words, service.model.text_tokenizer),
        "stop": [text for text in _stops(request.stop) if text] or None,
        "seed": _seed(request.seed),
        "logprobs": _num_top(request),
        "cache_salt": scoped_salt(key_name, request.cache_salt),
        "adapter": adapter_of(service, request.model),
        "timeout_s": limits.request_timeout_s,
        "queue_timeout_s": limits.queue_timeout_s,
    }
    _check_some_are_left(request, options["bad_words_ids"])
    try:
        return SamplingParams(**{name: value for name, value in options.items() if value not in (None, [], {})})
    except (InvalidArgumentError, UnsupportedArgumentError) as error:
        raise renamed_error(error, request) from error


def _check_lowest(request: TextRequest) -> None:
    """Raises ApiError, 400, for a value below those that the field takes."""
    for name, (kind, lowest, remedy) in _LOWEST.items():
        value = getattr(request, name)
        if value is not None and value < lowest:
            message = f"{name}: expected {kind} >= {lowest}, got {short_repr(value)}; {remedy}"
            raise bad_request(message, name, "invalid_value")


def _check_some_are_left(request: TextRequest, bad_words: list[list[int]] | None) -> None:
    """Raises ApiError, 400, where other fields forbid all tokens that are allowed."""
    if request.allowed_token_ids is None:
        return
    forbidden = {ids[0] for ids in bad_words or () if len(ids) == 1}
    if request.min_tokens:
        forbidden |= set(request.stop_token_ids or ())
    if forbidden.issuperset(request.allowed_token_ids):
        message = "allowed_token_ids: expected one that bad_words, and stop_token_ids with min_tokens, leave, got none"
        raise bad_request(message, "allowed_token_ids", "invalid_value")


def renamed_error(error: Exception, request: TextRequest) -> Exception:
    """Returns an error about an option of `SamplingParams` as one about its field."""
    message = in_words_of_requests(str(error))
    name = message.partition(":")[0]
    field = _RENAMED.get(name, name)
    if isinstance(request, ChatRequest):
        if field == "max_tokens" and request.max_completion_tokens is not None:
            field = "max_completion_tokens"
        if field == "logprobs":
            field = "top_logprobs"
    if field not in (fields := type(request).model_fields):
        is_part = re.split(r"[.\[]", field)[0] in fields  # such as messages[0].content
        return bad_request(message, field if is_part else None, "invalid_value")
    for old, new in _RENAMED.items():
        message = re.sub(rf"\b{old}\b", new, message)
    message = field + message[len(_RENAMED.get(name, name)) :]
    return bad_request(message, field, "invalid_value")


def _num_top(request: TextRequest) -> int | None:
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs: expected logprobs true with it", "top_logprobs", "invalid_value")
    found: int | None = request.num_top  # type: ignore[attr-defined]
    return found


def _stops(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _seed(seed: int | None) -> int | None:
    """Returns the seed; OpenAI's are signed."""
    if seed is None:
        return None
    if not -(2**63) <= seed <= MAX_SEED:
        raise bad_request(f"seed: expected a whole number of 64 bits, got {seed}", "seed", "invalid_value")
    return seed % (MAX_SEED + 1)


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise bad_request(
                f"logit_bias: expected token ids as keys, got {key[:40]!r}", "logit_bias", "invalid_value"
            )
    return {int(key): bias for key, bias in given.items()}


def _bad_words(words: list[str] | None, tokenizer: Any) -> list[list[int]] | None:
    """Returns the tokens of texts, also with a space in front if it matters, as vLLM."""
    if not words:
        return None
    if tokenizer is None:
        raise bad_request("bad_words: expected none for a model without a tokenizer", "bad_words", "invalid_value")
    wrong_len = next((len(word) for word in words if not 0 < len(word) <= MAX_BAD_WORD_CHARS), None)
    if len(words) > MAX_BAD_WORDS or wrong_len is not None:
        raise bad_request(
            f"bad_words: expected at most {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_CHARS} characters, got "
            + (f"{len(words)} texts" if wrong_len is None else f"one of {wrong_len} characters"),
            "bad_words",
            "invalid_value",
        )
    found: list[list[int]] = []
    for word in words:
        plain, spaced = (tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False) for prefix in ("", " "))
        found.append(plain)
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return [ids for ids in found if ids]
