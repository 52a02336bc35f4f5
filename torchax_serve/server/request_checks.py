"""Checks of lists, numbers and texts in a request before any work is done for it."""

from __future__ import annotations

from collections.abc import Sequence

from torchax_serve.sampling_params import MAX_STOPS
from torchax_serve.server.errors import bad_request
from torchax_serve.server.options import RequestLimits
from torchax_serve.server.schemas import TextRequest


def check_counts(request: TextRequest, limits: RequestLimits) -> None:
    """Raises ApiError, 400, for a number of answers or of stop strings beyond the limits."""
    num_answers = 1 if request.n is None else request.n
    if not 1 <= num_answers <= limits.max_answers:
        raise bad_request(
            f"n: expected a whole number from 1 to {limits.max_answers}, got {num_answers}", "n", "invalid_value"
        )
    best_of, most = request.best_of, limits.max_answers if request.use_beam_search else num_answers
    if best_of is not None and not num_answers <= best_of <= most:
        expected = f"n={num_answers}" + (f" to {most} beams" if request.use_beam_search else "")
        raise bad_request(f"best_of: expected {expected}, got {best_of}", "best_of", "invalid_value")
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOPS:
        raise bad_request(
            f"stop: expected at most {MAX_STOPS} strings, got {len(request.stop)}", "stop", "invalid_value"
        )
    if request.stream_options is not None and request.stream_options.model_fields_set and not request.stream:
        raise bad_request("stream_options: expected stream true with it", "stream_options", "invalid_value")


def truncated(
    prompt_ids: Sequence[int], request: TextRequest, max_model_len: int | None, max_new_tokens: int | None
) -> list[int]:
    """Returns the tokens of a prompt that a request with ``truncate_prompt_tokens`` has read.

    Args:
        prompt_ids: Tokens of the whole prompt.
        request: The request.
        max_model_len: Largest number of tokens of prompt and answer; None without a limit.
        max_new_tokens: Most tokens of the answer.

    Raises:
        ApiError: 400 for a number that is none of tokens, or a side without it.
    """
    most, field = request.truncate_prompt_tokens, "truncate_prompt_tokens"
    if most is None:
        return list(prompt_ids)
    room = None if max_model_len is None else max_model_len - max(1, max_new_tokens or 1)
    if most < -1 or most == 0 or (room is not None and most > room):
        limit = "-1 or more" if room is None else f"-1, or 1 to {room} next to those of the answer"
        raise bad_request(f"{field}: expected {limit}, got {most}", field, "invalid_value")
    if most == -1 and room is None:
        return list(prompt_ids)
    num_kept = room if most == -1 else most
    return list(prompt_ids[:num_kept] if request.truncation_side == "right" else prompt_ids[-(num_kept or 1) :])


def check_num_messages(number: int, limits: RequestLimits, field: str) -> None:
    """Raises ApiError, 400, for more messages than a conversation may have."""
    if number > limits.max_messages:
        raise bad_request(f"{field}: expected at most {limits.max_messages}, got {number}", field, "invalid_value")


def check_text_size(text: str, limits: RequestLimits, field: str) -> None:
    """Raises ApiError, 400, for a text whose tokens would take seconds to compute and to list."""
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    if num_bytes > limits.max_text_bytes:
        raise bad_request(
            f"{field}: expected texts of at most {limits.max_text_bytes} bytes in UTF-8, got {num_bytes}; split it",
            field,
            "context_length_exceeded",
        )
