"""The signature of a forward, and what it calls the tokens that it decodes; encoder-decoder models have other names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any


@dataclasses.dataclass(frozen=True)
class CallSignature:
    """Argument names of the new tokens, and of what is said about them."""

    ids: str  # int64[batch, len]
    embeds: str  # float[batch, len, hidden], in their place
    mask: str  # which tokens are real
    positions: str

    @property
    def per_token_args(self) -> frozenset[str]:
        """All of them; they may be padded along the sequence."""
        return frozenset({self.ids, self.embeds, self.mask, self.positions})

    @property
    def has_encoder(self) -> bool:
        """Whether the tokens are a decoder's beside an encoder."""
        return self is ENCODER_DECODER


DECODER_ONLY = CallSignature("input_ids", "inputs_embeds", "attention_mask", "position_ids")
ENCODER_DECODER = CallSignature(
    "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "decoder_position_ids"
)


def signature_of(config: Any, parameters: Collection[str]) -> CallSignature:
    """The names that a forward with `parameters` has for what it decodes."""
    has_encoder = bool(getattr(config, "is_encoder_decoder", False)) and ENCODER_DECODER.ids in parameters
    return ENCODER_DECODER if has_encoder else DECODER_ONLY


TORCH_CLASS = "_torch_class"
"""Attribute of a class that runs on JAX: the class as transformers has it."""
PATCHED = "_patched_forward"
"""Attribute of a model with the forward that a script had put in the place of its class's when it came to JAX."""


def forward_of(model: Any) -> tuple[Callable[..., Any], inspect.Signature]:
    """The forward of `model` in PyTorch, bound to it, and its signature.

    One that a script has put in the place of the class's and that takes anything has the signature of the class's.
    """
    cls = getattr(type(model), TORCH_CLASS, type(model))
    of_class = functools.partial(cls.forward, model)
    patched = vars(model).get(PATCHED)
    if patched is None:
        return of_class, inspect.signature(of_class)
    signature = inspect.signature(patched)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return patched, inspect.signature(of_class) if takes_any else signature
