"""Token masks that end the reasoning of an answer after so many tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from model_adapters.errors import UnsupportedModelError
from torchax_serve.sampling.token_masks import MASKS, TokenMasks

MAX_HELD = 64
"""Tokens in front of a reasoning in which its opening text is looked for."""


@dataclasses.dataclass(frozen=True)
class ReasoningMarkers:
    """Texts around the reasoning of a family of models.

    Attributes:
        opening: Text in front of it.
        closing: Text behind it.
        ends: Other texts that end it.
        gap: Text that may follow the opening one, and is no reasoning.
        is_first: Whether it begins an answer, or follows another reasoning; else it may stand anywhere.
    """

    opening: str
    closing: str
    ends: tuple[str, ...] = ()
    gap: str = ""
    is_first: bool = True

    @property
    def closers(self) -> tuple[str, ...]:
        """All texts that end it."""
        return self.closing, *self.ends

    def behind_opening(self, text: str) -> str | None:
        """Returns the text behind the opening one; None without it."""
        if self.is_first:
            stripped = text.lstrip()
            return stripped[len(self.opening) :] if stripped.startswith(self.opening) else None
        _, found, behind = text.partition(self.opening)
        return behind if found else None

    def is_open(self, text: str) -> bool:
        """Returns whether a reasoning of an answer that begins with `text` goes on at its end."""
        while (behind := self.behind_opening(text)) is not None:
            end = _first_end(behind, self.closers)
            if end is None:
                return True
            text = behind[end:]
        return False


class MarkerTokens:
    """The markers in the tokens of one tokenizer.

    Args:
        markers: Texts around the reasoning.
        tokenizer: A tokenizer of transformers.

    Attributes:
        closing_ids: Tokens of the closing text.
        reopening: Tokens at the end of an answer, and the one that would begin another reasoning behind them; None
            where that cannot be told from other text.

    Raises:
        UnsupportedModelError: The tokenizer has no tokens for the closing text.
    """

    def __init__(self, markers: ReasoningMarkers, tokenizer: Any) -> None:
        self.markers, self._tokenizer = markers, tokenizer
        self.closing_ids = self._encode(markers.closing)
        if markers.closing not in self.decode(self.closing_ids):
            raise UnsupportedModelError(
                f"expected a tokenizer that spells {markers.closing} for a thinking budget, got one that does not"
            )
        opening_ids = self._encode(markers.opening)
        num_before = min(1, len(opening_ids) - 1)  # the first token of several begins other texts as well
        is_told = bool(opening_ids) and opening_ids[0] in tokenizer.added_tokens_decoder
        self.reopening = (opening_ids[:num_before], opening_ids[num_before]) if is_told else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class ThinkingBudgetMasks:
    """Masks of one request that hold its reasoning to a number of tokens (`TokenMasks`).

    Tokens count from the opening text to the closing one, those of several reasonings together. Once they are spent,
    the closing text is the only one that may follow, and no other reasoning is begun.

    Args:
        budget: Most tokens of reasoning.
        tokens: The markers' tokens.
        begun: Text of the answer that the prompt has written; its reasoning does not count.
        inner: Further masks of the request, such as those of a grammar.
    """

    def __init__(self, budget: int, tokens: MarkerTokens, begun: str = "", inner: TokenMasks | None = None) -> None:
        self._budget, self._tokens, self._inner = budget, tokens, inner
        self._markers = tokens.markers
        self._stage: Literal["before", "inside", "behind"] = "before"
        self._num_read = self._num_spent = 0
        self._num_inside = 0  # of the open reasoning
        self._num_closed = 0  # reasonings that have ended
        self._held: list[int] = []  # tokens in which a marker is looked for
        self._begun = ""  # text in front of them
        self._begin(begun)

    @property
    def option(self) -> str:
        """Name of the option that asks for these masks, for errors."""
        return "thinking_token_budget" if self._inner is None else MASKS

    @property
    def is_done(self) -> bool:
        """Whether every token may follow from now on."""
        return self._stage == "behind" and self._inner is None

    def fill(self, bitmask: np.ndarray, output_ids: Sequence[int]) -> None:
        """Implements `TokenMasks.fill`."""
        if self._inner is not None:
            self._inner.fill(bitmask, output_ids)
        for token_id in output_ids[self._num_read :]:
            self._take(token_id)
        self._num_read = len(output_ids)
        if self._stage == "behind" or self._num_spent < self._budget:
            return
        bits = bitmask.view(np.uint32)
        if self._stage == "inside":
            token_id = self._tokens.closing_ids[self._num_closing()]
            kept = bits[token_id // 32] & np.uint32(1 << (token_id % 32))
            bits[:] = 0
            bits[token_id // 32] = kept
        elif self._num_closed and self._tokens.reopening is not None:
            before, token_id = self._tokens.reopening
            if tuple(self._held[len(self._held) - len(before) :]) == before:
                bits[token_id // 32] &= ~np.uint32(1 << (token_id % 32))

    def _num_closing(self) -> int:
        """Returns how many tokens of the closing text end the reasoning already."""
        closing, held = self._tokens.closing_ids, tuple(self._held)
        longest = min(len(closing) - 1, len(held))
        return next(num for num in range(longest, -1, -1) if held[len(held) - num :] == closing[:num])

    def _begin(self, text: str) -> None:
        """Takes the text that the prompt has written."""
        while (found := self._markers.behind_opening(text)) is not None:
            end = _first_end(found, self._markers.closers)
            if end is None:
                self._stage, self._begun = "inside", found[-len(self._markers.closing) :]
                return
            text, self._num_closed = found[end:], self._num_closed + 1
        self._begun = text

    def _take(self, token_id: int) -> None:
        """Takes the next token of the answer."""
        if self._stage == "behind":
            return
        self._held.append(token_id)
        text = self._begun + self._tokens.decode(self._held)
        if self._stage == "before":
            self._look_for_opening(text)
        else:
            self._look_for_end(text)

    def _look_for_opening(self, text: str) -> None:
        markers = self._markers
        behind = markers.behind_opening(text)
        if behind is not None:
            self._stage, self._num_inside = "inside", 0
            self._held, self._begun = [], behind
        elif markers.is_first and not markers.opening.startswith(text.lstrip()):
            self._stage = "behind"
        elif len(self._held) > MAX_HELD:
            self._begun, self._held = "", self._held[-MAX_HELD // 2 :]

    def _look_for_end(self, text: str) -> None:
        if (end := _first_end(text, self._markers.closers)) is not None:
            self._num_spent -= min(self._num_inside, self._num_end_tokens() - 1)  # of the text that ends it
            self._num_closed += 1
            self._stage, self._held, self._begun = "before", [], text[end:]
            self._look_for_opening(self._begun)
            return
        if not self._num_inside and self._markers.gap and text.strip(" ") == self._markers.gap:
            return
        self._num_inside += 1
        self._num_spent += 1
        if len(self._held) > MAX_HELD:
            self._begun, self._held = "", self._held[-MAX_HELD // 2 :]

    def _num_end_tokens(self) -> int:
        """Returns the tokens over which the text that ends the reasoning is spread."""
        held, closers = self._held, self._markers.closers
        return next(
            (num for num in range(1, len(held)) if _first_end(self._tokens.decode(held[-num:]), closers) is not None),
            len(held),
        )


def _first_end(text: str, closers: Sequence[str]) -> int | None:
    """Returns the place behind the first of some texts; None without any."""
    ends = [text.index(closer) + len(closer) for closer in closers if closer in text]
    return min(ends, default=None)
