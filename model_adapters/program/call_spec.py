"""The static parts of calls of a model: of its forward, or of a method."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """The static part of a call: everything here that differs means another compilation.

    Attributes:
        output_hidden_states: return the hidden states of every layer.
        output_attentions: return attention weights; attention then runs as the model's own eager code.
        left_padded: the batch is padded on the left, so the forward gets an attention mask.
        static_args: further keyword arguments of the forward that are not arrays; a `StaticTensor` is a tensor to model
        code.
    """

    output_hidden_states: bool = False
    output_attentions: bool = False
    left_padded: bool = False
    static_args: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """The static part of a call of a method.

    Attributes:
        path: of the method, from the module.
        extra: as in `CallSpec`.
    """

    path: str
    extra: tuple[tuple[str, Any], ...] = ()
