"""Inputs of a request to an executor besides its prompt.

They are an encoder's input or output, or all steps of the request.
"""

from __future__ import annotations

from typing import Protocol

import jax
import numpy as np

from model_adapters.errors import TorchaxServeError
from torchax_serve.outputs import FinishReason


class SequenceEnded(TorchaxServeError):
    """Raised by a step of a sequence that has no further token; `reason` says why it has ended."""

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(f"the sequence has ended ({reason})")
        self.reason = reason


class SequenceSteps(Protocol):
    """Steps of one request, with a cache of its own.

    Attributes:
        runs_ahead: Whether `decode` returns before its input has been computed, so that steps can be sent ahead.
    """

    runs_ahead: bool

    def prefill(self) -> jax.Array:
        """Computes the prompt; returns the logits of the first new token, float32[1, vocab].

        Raises:
            SequenceEnded: there is no token.
        """

    def decode(self, last_tokens: jax.Array) -> jax.Array:
        """Returns the logits that follow the newest token, int32[1]: float32[1, vocab].

        Raises:
            SequenceEnded: there is no further token.
        """

    def cancel(self) -> None:
        """Ends a step that blocks, from any thread."""

    def close(self) -> None:
        """Frees the cache. Closing twice does nothing."""


RequestInput = tuple[int, ...] | np.ndarray | SequenceSteps
"""Token ids for an encoder, none for a model without one; an encoder's output, float[1, len, width]; or all steps."""
