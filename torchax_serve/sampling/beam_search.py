"""Beam search as transformers has it, on log-probabilities of the likeliest tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np

_NONE = np.float32(-1e9)
"""Score of a beam that there is not; transformers', whose comparisons with it count."""


@dataclasses.dataclass(frozen=True)
class BeamOptions:
    """Options of a beam search, by transformers' names.

    Attributes:
        num_beams: Number of beams.
        max_new_tokens: Most new tokens of a sequence.
        eos_token_ids: Tokens that end a sequence.
        length_penalty: Exponent of the length by which scores are divided; above 0 longer sequences are preferred.
        early_stopping: True: the search ends as soon as `num_beams` sequences have; False: when a heuristic finds no
            better ones likely; "never": when there can be none.
    """

    num_beams: int
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def num_candidates(self) -> int:
        """Number of likeliest tokens behind each beam that can be chosen."""
        return self.num_beams + len(self.eos_token_ids)


class Beam(NamedTuple):
    """A sequence and its score, a sum of log-probabilities; an ended one's has the penalty."""

    token_ids: tuple[int, ...]
    score: np.float32
    is_finished: bool = False


class BeamSearch:
    """A search over the continuations of one prompt.

    Attributes:
        running: Beams whose next tokens are needed, best first.
        is_done: Whether the search has ended.
    """

    def __init__(self, options: BeamOptions) -> None:
        self._options = options
        self.running = [Beam((), np.float32(0))]
        self._ended = [Beam((), _NONE)] * options.num_beams
        self._may_improve, self.is_done = True, False
        self._ends_when_full = options.early_stopping is True or options.num_beams == 1  # one beam is greedy

    @property
    def ended(self) -> list[Beam]:
        """Ended sequences, best first."""
        return [beam for beam in self._ended if beam.is_finished]

    def advance(self, candidates: Sequence[Collection[tuple[int, float]]]) -> None:
        """Takes the likeliest next tokens of each running beam.

        Args:
            candidates: For each of `running`, pairs of token id and log-probability, `BeamOptions.num_candidates`.
        """
        options, num_beams = self._options, self._options.num_beams
        found = [
            Beam((*beam.token_ids, token_id), beam.score + np.float32(logprob))
            for beam, tokens in zip(self.running, candidates, strict=True)
            for token_id, logprob in tokens
        ]
        found = sorted(found, key=lambda beam: -beam.score)
        length = len(found[0].token_ids)
        ends = [length == options.max_new_tokens or beam.token_ids[-1] in options.eos_token_ids for beam in found]
        self._add_ended([beam for beam, end in zip(found[:num_beams], ends, strict=False) if end], length)
        self.running = [beam for beam, end in zip(found, ends, strict=True) if not end][:num_beams]
        if self.running:
            self._may_improve = self._may_improve and self._finds_better(length)
        is_full = self._ends_when_full and all(beam.is_finished for beam in self._ended)
        self.is_done = not self.running or not self._may_improve or is_full

    def _add_ended(self, beams: Sequence[Beam], length: int) -> None:
        """Keeps the best of the sequences that have ended, among them new ones of `length` tokens."""
        if self._ends_when_full and all(beam.is_finished for beam in self._ended):
            return
        divisor = np.float32(float(length) ** self._options.length_penalty)
        new = [Beam(beam.token_ids, beam.score / divisor, is_finished=True) for beam in beams]
        merged = sorted([*self._ended, *new], key=lambda beam: -beam.score)
        self._ended = merged[: self._options.num_beams]

    def _finds_better(self, length: int) -> bool:
        """Returns whether a running beam may end up better than the worst of the ended sequences."""
        options = self._options
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = options.max_new_tokens
        best = self.running[0].score / np.float32(float(length) ** options.length_penalty)
        worst = min(beam.score for beam in self._ended)
        return any(best > (worst if beam.is_finished else _NONE) for beam in self._ended)
