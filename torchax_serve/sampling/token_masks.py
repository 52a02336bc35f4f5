"""Token masks by row: the tokens that a request may sample next.

The host computes them from the request's tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

MASKS = "masks"
"""Name of a request's token masks among its options, unless they have one of their own as `option`."""
ALL_TOKENS = np.int32(-1)
"""Word of a mask in which every bit is set."""


def num_words(vocab_size: int) -> int:
    """Returns the words of a row's mask, a bit for each column of the logits."""
    return -(-vocab_size // 32)


class TokenMasks(Protocol):
    """The masks of one request, such as those of a grammar.

    An attribute `is_done` that is true says that every token may follow from now on; then they are not asked again.

    Called by the engine's thread, and before by the one that submits the request.
    """

    def fill(self, words: np.ndarray, output_ids: Sequence[int]) -> None:
        """Writes which tokens may follow; it may be called again with the same tokens.

        Args:
            words: int32[ceil(vocab / 32)], every bit set; bit i of word w is token 32 w + i, and a cleared one is
                never sampled.
            output_ids: Tokens of the answer so far.

        Raises:
            Exception: The request fails with it; others go on.
        """


def mask_logits(
    logits: jax.Array, words: jax.Array | None, then: Callable[[jax.Array], jax.Array] = lambda logits: logits
) -> jax.Array:
    """Returns logits with those of masked tokens at minus infinity.

    Rows without masks cost a look at their words.

    Args:
        logits: float[n, vocab].
        words: int32[n, ceil(vocab / 32)], as `TokenMasks.fill` writes them; None: no token is masked.
        then: A function of the logits, whose result is returned: logits of many rows take long to copy.
    """
    if words is None:
        return then(logits)

    def masked() -> jax.Array:
        bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
        allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]] != 0
        return then(jnp.where(allowed, logits, jnp.asarray(-jnp.inf, logits.dtype)))

    return jax.lax.cond((words == ALL_TOKENS).all(), lambda: then(logits), masked)
