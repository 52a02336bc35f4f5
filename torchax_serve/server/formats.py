"""Parts shared by answers of chats and completions: usage, reasons, log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from model_adapters.errors import QueueDeadlineError
from torchax_serve.outputs import FinishReason, TokenLogprobs
from torchax_serve.server.answers import Answer
from torchax_serve.server.errors import ApiError, api_error_of
from torchax_serve.text.token_text import TokenBytes


def usage_of(answers: Iterable[Answer], num_prompt_tokens: int, num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """Returns the usage of a request: each prompt counts once for all its answers."""
    answers = list(answers)
    num_new = sum(answer.num_tokens for answer in answers)
    cached: dict[int, int] = {}  # by prompt, as the first of its answers found it
    for answer in answers:
        cached.setdefault(id(answer.prompt_ids), answer.num_cached_tokens)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new,
        "total_tokens": num_prompt_tokens + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }


NOT_GIVEN: Mapping[str, None] = dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
"""Fields of complete answers that vLLM's clients may read, and that have no values here."""


def _num_chars(text: bytes) -> int:
    """Returns the number of characters that begin in a piece of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in text)


def finish_reason_of(reason: FinishReason | None) -> str | None:
    """Returns OpenAI's name of the reason for the end of an answer.

    Raises:
        ApiError: The answer did not end by itself.
    """
    if reason in (None, "stop", "length"):
        return reason
    if reason == "deadline":
        raise ApiError(504, "expected an answer within the time limit of requests, got a longer one; lower max_tokens")
    if reason == "queue_deadline":
        raise api_error_of(QueueDeadlineError())
    raise ApiError(503, "the request was ended by the server; send it again")


def _likeliest(found: TokenLogprobs, num_top: int) -> tuple[tuple[int, float], ...]:
    """Returns the `num_top` likeliest tokens with their log-probabilities; all for -1."""
    return found.top if num_top == -1 else found.top[:num_top]


class LogprobFormat:
    """Writes log-probabilities in the forms of OpenAI and vLLM.

    Args:
        token_bytes: Bytes of the model's tokens.
        as_ids: Whether tokens are written ``token_id:N``.
    """

    def __init__(self, token_bytes: TokenBytes, *, as_ids: bool = False) -> None:
        self._token_bytes, self._as_ids = token_bytes, as_ids

    def text(self, token_id: int) -> str:
        """Returns how a token is shown."""
        return f"token_id:{token_id}" if self._as_ids else self._token_bytes.text(token_id)

    def chat(self, logprobs: Sequence[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
        """Returns the entries of a chat's ``logprobs.content``."""
        return [
            self._entry(each.token_id, each.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in _likeliest(each, num_top)]}
            for each in logprobs
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = list(self._token_bytes(token_id))
        return {"token": self.text(token_id), "logprob": max(logprob, -9999.0), "bytes": token_bytes}

    def offsets_in(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Returns where each token stands in a text; those without text stand where the next does."""
        data, place, offset, found = text.encode(), 0, 0, []
        for token_id in token_ids:
            found.append(offset)
            token = self._token_bytes(token_id)
            if not data.startswith(token, place) and not place:
                token = token.lstrip(b" ")  # which tokenizers write in front of a text
            if token and data.startswith(token, place):
                offset, place = offset + _num_chars(token), place + len(token)
        return found

    def offsets(self, token_ids: Sequence[int], offset: int, hidden: Collection[int]) -> tuple[list[int], int]:
        """Returns where each token of an answer stands in its text, and where the next one will.

        Args:
            token_ids: The tokens.
            offset: Place of the first of them.
            hidden: Tokens without text.
        """
        found = []
        for token_id in token_ids:
            found.append(offset)
            offset += 0 if token_id in hidden else _num_chars(self._token_bytes(token_id))
        return found, offset

    def completion(
        self,
        logprobs: Sequence[TokenLogprobs | None],
        token_ids: Sequence[int],
        num_top: int,
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """Returns ``logprobs`` of a plain completion; those of a prompt's first token are null.

        Args:
            logprobs: Of the tokens; None for a first one.
            token_ids: The tokens.
            num_top: Number of likeliest tokens.
            offsets: Where each token stands in the text.
        """
        tokens = [self.text(token_id) for token_id in token_ids]
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else max(each.logprob, -9999.0) for each in logprobs],
            "top_logprobs": [self._top(each, num_top) for each in logprobs],
            "text_offset": list(offsets),
        }

    def _top(self, found: TokenLogprobs | None, num_top: int) -> dict[str, float] | None:
        """Returns log-probabilities by text: of the likeliest tokens, and of the sampled one."""
        if found is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*_likeliest(found, num_top), (found.token_id, found.logprob)):
            top.setdefault(self.text(token_id), max(logprob, -9999.0))
        return top

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Returns vLLM's ``prompt_logprobs``: by token id, None for the first token."""
        found: list[dict[str, Any] | None] = []
        for each in logprobs:
            if each is None:
                found.append(None)
                continue
            ranks = {token_id: rank for rank, (token_id, _) in enumerate(each.top, 1)}
            entries = dict([(each.token_id, each.logprob), *each.top])
            found.append(
                {
                    str(token_id): {
                        "logprob": max(logprob, -9999.0),
                        "rank": ranks.get(token_id, each.rank),
                        "decoded_token": self._token_bytes.text(token_id),
                    }
                    for token_id, logprob in entries.items()
                }
            )
        return found
