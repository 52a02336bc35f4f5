"""What a forward calls the tokens that it decodes: those of an encoder-decoder model have names of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any


@dataclasses.dataclass(frozen=True)
class CallNames:
    """Argument names of the new tokens, and of what is said about them."""

    ids: str  # int64[batch, len]
    embeds: str  # float[batch, len, hidden], in their place
    mask: str  # which tokens are real
    positions: str

    @property
    def sequence(self) -> frozenset[str]:
        """All of them; they may be padded along the sequence."""
        return frozenset({self.ids, self.embeds, self.mask, self.positions})

    @property
    def has_encoder(self) -> bool:
        """Whether the tokens are a decoder's beside an encoder."""
        return self is ENCODER_DECODER


DECODER_ONLY = CallNames("input_ids", "inputs_embeds", "attention_mask", "position_ids")
ENCODER_DECODER = CallNames(
    "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "decoder_position_ids"
)


def names_of(config: Any, parameters: Collection[str]) -> CallNames:
    """The names that a forward with `parameters` has for what it decodes."""
    has_encoder = bool(getattr(config, "is_encoder_decoder", False)) and ENCODER_DECODER.ids in parameters
    return ENCODER_DECODER if has_encoder else DECODER_ONLY
