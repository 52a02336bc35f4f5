"""Inputs of a request to an executor besides its prompt.

They are an encoder's input or output, or all steps of the request.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True, eq=False)
class MediaInput:
    """Images or audio of a prompt, encoded.

    Attributes:
        prompt_ids: Token ids of the prompt, with a placeholder for each feature.
        features: float[n, width], in place of the embeddings of placeholders.
        index: int32[prompt_len], row of `features`; -1: a token of text.
        positions: int32[axes, prompt_len], for rotary embeddings; None: those of text.
        delta: Position for rotary embeddings of a token behind the prompt, minus its position.
        sees_until: int32[prompt_len], last position that a token sees if that is behind its own; None: no token does.
        page_ids: What cached pages are found by: token ids, and in place of placeholders ids made of the pixels.
    """

    prompt_ids: tuple[int, ...]
    features: np.ndarray
    index: np.ndarray
    positions: np.ndarray | None
    delta: int
    sees_until: np.ndarray | None
    page_ids: tuple[int, ...]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Beginnings and ends of tokens that see each other, and so are computed in one step."""
        if self.sees_until is None:
            return ()
        found: list[tuple[int, int]] = []
        for position, last in enumerate(self.sees_until.tolist()):
            if last <= position:
                continue
            if found and position < found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], last + 1))
            else:
                found.append((position, last + 1))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class SpanLimits:
    """Limits of an engine for tokens of an image that see each other.

    Attributes:
        sees_ahead: Whether tokens may see later ones.
        max_len: Most tokens that are computed in one step.
        shortest_window: Tokens of the shortest sliding window; None if all layers see all tokens.
    """

    sees_ahead: bool
    max_len: int
    shortest_window: int | None


RequestInput = tuple[int, ...] | np.ndarray | SequenceSteps | MediaInput
"""Token ids for an encoder, none for a model without one; an encoder's output, float[1, len, width]; all steps; or
images and audio."""
