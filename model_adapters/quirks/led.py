"""LED makes no mask for a step of one token (5.23: `LEDDecoder.forward`), which then sees all that its cache has."""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.stored_mask import stored_mask


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    output_attentions: bool = False,
) -> Any:
    if key_value_states is None and attention_mask is None:
        batch, num_new, _ = hidden_states.shape
        mask = stored_mask(past_key_values, self.layer_idx, hidden_states, num_new)
        attention_mask = None if mask is None else mask.expand(batch, 1, num_new, -1)
    return type(self).forward(self, hidden_states, key_value_states, past_key_values, attention_mask, output_attentions)


REPLACED = {"LEDDecoderAttention.forward": _forward}
