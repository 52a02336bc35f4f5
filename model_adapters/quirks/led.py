"""LED makes no mask for a step of one token, and its encoder reads mask values on the host.

Without a mask all keys are seen, and a cache of fixed shapes has free capacity (5.23: `LEDDecoder.forward`). The
encoder asks which tokens are global and which are padding, so its program is for one mask and one input length.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.program.call_signature import cache_in
from model_adapters.quirks.missing_step_mask import stored_mask
from model_adapters.quirks.quirk import Quirk


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    output_attentions: bool = False,
    **given: Any,
) -> Any:
    cache = cache_in(given)
    if key_value_states is None and attention_mask is None:
        batch, num_new, _ = hidden_states.shape
        mask = stored_mask(cache, self.layer_idx, hidden_states, num_new)
        attention_mask = None if mask is None else mask.expand(batch, 1, num_new, -1)
    return type(self).forward(self, hidden_states, key_value_states, cache, attention_mask, output_attentions)


QUIRK = Quirk(methods={"LEDDecoderAttention.forward": _attention}, reads_mask_on_host=True)
