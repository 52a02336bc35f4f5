"""Final text and end of an answer, from its tokens, one engine step at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from torchax_serve.outputs import FinishReason, TokenLogprobs
from torchax_serve.text.detokenizer import Detokenizer, NoText, StopStrings


@dataclasses.dataclass(frozen=True)
class AnswerStep:
    """Addition of one step to an answer.

    Attributes:
        text: Text that became final; it never ends inside a character.
        token_ids: New token ids.
        logprobs: Log-probabilities of `token_ids`; None if they were not requested.
        finish_reason: Why the answer ended; None while it goes on.
        stop: The stop string or the token of ``stop_token_ids`` that ended it; None for any other end.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None


class StepDecoder:
    """Decodes the steps of one answer.

    Args:
        detokenizer: Of this answer; it is used by it only.
        stop_strings: Texts that end the answer.
        eos_token_ids: Tokens that end it.
        stop_token_ids: Those of them that the request named; they have no text.
        include_stop: Whether the text has the stop string or the stop token.
        silent_ids: Further tokens without text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | NoText,
        stop_strings: Sequence[str] = (),
        eos_token_ids: Collection[int] = (),
        stop_token_ids: Collection[int] = (),
        *,
        include_stop: bool = False,
        silent_ids: Collection[int] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._stops, self._has_stop_strings = StopStrings(stop_strings), bool(stop_strings)
        self._eos_token_ids, self._stop_token_ids = frozenset(eos_token_ids), frozenset(stop_token_ids)
        self._include_stop, self._silent_ids = include_stop, frozenset(silent_ids)
        self.finish_reason: FinishReason | None = None

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> AnswerStep:
        """Takes the tokens of a step and, with the last one, why the engine ended the request.

        Tokens behind the one that completes a stop string are dropped.
        """
        pieces: list[str] = []
        stop: str | int | None = None
        num_taken = self._num_until_end(token_ids)
        if not self._has_stop_strings:
            pieces.append(
                self._detokenizer.push_all(int(each) for each in token_ids[:num_taken] if self._is_shown(each))
            )
        else:
            for index, token_id in enumerate(token_ids[:num_taken]):
                text = self._detokenizer.push(int(token_id)) if self._is_shown(token_id) else ""
                pieces.append(self._stops.push(text))
                if self._stops.found is not None:
                    num_taken = index + 1
                    break
        if self._stops.found is None and num_taken and token_ids[num_taken - 1] in self._eos_token_ids:
            self.finish_reason = "stop"
            last = int(token_ids[num_taken - 1])
            stop = last if last in self._stop_token_ids else None
        if self._stops.found is None and self.finish_reason is None:
            self.finish_reason = finish_reason
        if self._stops.found is None and self.finish_reason not in (None, "abort", "error"):
            pieces.append(self._stops.push(self._detokenizer.flush()))
            if self._stops.found is None:
                pieces.append(self._stops.flush())
        if self._stops.found is not None:
            self.finish_reason, stop = "stop", self._stops.found
            if self._include_stop:
                pieces.append(self._stops.found)
        taken = None if logprobs is None else tuple(logprobs[:num_taken])
        return AnswerStep("".join(pieces), tuple(token_ids[:num_taken]), taken, self.finish_reason, stop)

    def _num_until_end(self, token_ids: Sequence[int]) -> int:
        """Returns the number of tokens up to the first one that ends the answer, which counts."""
        ends = (index + 1 for index, token_id in enumerate(token_ids) if token_id in self._eos_token_ids)
        return next(ends, len(token_ids))

    def _is_shown(self, token_id: int) -> bool:
        """Returns whether a token has text."""
        is_stop = token_id in self._stop_token_ids and not self._include_stop
        return not is_stop and token_id not in self._silent_ids
