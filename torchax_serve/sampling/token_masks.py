"""Token masks by row: the tokens that a request may sample next.

The host computes them from the request's tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.device_arrays import to_device

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


def mask_logits(logits: jax.Array, words: np.ndarray) -> jax.Array:
    """Returns logits float[n, vocab] with those of masked tokens at minus infinity.

    Args:
        logits: float[n, vocab].
        words: int32[rows, ceil(vocab / 32)] of the first rows, as `TokenMasks.fill` writes them; rows <= n.
    """
    padded = np.full((len(logits), words.shape[1]), ALL_TOKENS)
    padded[: len(words)] = words
    return _masked(logits, to_device(padded, np.int32))


@jax.jit
def _masked(logits: jax.Array, words: jax.Array) -> jax.Array:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed, logits, -jnp.inf).astype(logits.dtype)
