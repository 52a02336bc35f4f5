"""Token masks by row: the tokens that a request may sample next.

The host computes them from the request's tokens so far, as vLLM does for structured outputs. On the way to the device a
mask is a bitmask, a bit for each token:

1. A request brings an object with the protocol `TokenMasks` (`Request.masks`), such as the grammar of the server.
2. `MaskedRequests` keeps it until the request ends; `MaskedRequests.of` finds the masked rows of a plan.
3. `ModelRunner.execute` sends the forward first. While the device computes logits, `PlanMasks.bitmask` reads the tokens
   of the steps in flight, which grammars need, and calls `TokenMasks.fill` for each masked row.
4. `Sampler.sample` sends the bitmask, and `mask_logits` applies it on the device. While no row of a step is masked, a
   bitmask of ones that stays on the device takes its place, so that the program is the same.
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
"""Word of a bitmask in which every bit is set."""


def num_words(vocab_size: int) -> int:
    """Returns the int32 words of a row's bitmask, which has a bit for each column of the logits."""
    return -(-vocab_size // 32)


class TokenMasks(Protocol):
    """The masks of one request, such as those of a grammar.

    An attribute `is_done` that is true says that every token may follow from now on; then they are not asked again.

    Called by the engine's thread, and before by the one that submits the request.
    """

    def fill(self, bitmask: np.ndarray, output_ids: Sequence[int]) -> None:
        """Writes which tokens may follow; it may be called again with the same tokens.

        Args:
            bitmask: int32[ceil(vocab / 32)], every bit set; bit i of word w is token 32 w + i, and a cleared one is
                never sampled.
            output_ids: Tokens of the answer so far.

        Raises:
            Exception: The request fails with it; others go on.
        """


def mask_logits(
    logits: jax.Array, bitmask: jax.Array | None, then: Callable[[jax.Array], jax.Array] = lambda logits: logits
) -> jax.Array:
    """Returns logits with those of masked tokens at minus infinity.

    Rows without masks cost a look at their words.

    Args:
        logits: float[n, vocab].
        bitmask: int32[n, ceil(vocab / 32)], as `TokenMasks.fill` writes them; None: no token is masked.
        then: A function of the logits, whose result is returned: logits of many rows take long to copy.
    """
    if bitmask is None:
        return then(logits)

    def masked() -> jax.Array:
        bits = (bitmask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
        allowed = bits.reshape(len(bitmask), -1)[:, : logits.shape[1]] != 0
        return then(jnp.where(allowed, logits, jnp.asarray(-jnp.inf, logits.dtype)))

    return jax.lax.cond((bitmask == ALL_TOKENS).all(), lambda: then(logits), masked)
