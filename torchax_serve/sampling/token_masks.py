"""Masks of tokens by row: what a request may sample next, decided on the host from its tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

ALL_TOKENS = np.int32(-1)
"""Word of a mask in which every bit is set."""


class TokenMasks(Protocol):
    """The masks of one request, such as those of a grammar. Called by the engine's thread only."""

    def fill(self, words: np.ndarray, output_ids: Sequence[int]) -> None:
        """Writes which tokens may follow.

        Args:
            words: int32[ceil(vocab / 32)], every bit set; bit i of word w is token 32 w + i, and a cleared one is
                never sampled.
            output_ids: Tokens of the answer so far.

        Raises:
            Exception: The request fails with it; others go on.
        """
