"""FSMT makes no mask of its own tokens where there is a cache (5.23: `FSMTModel.forward`): all that it has is seen.

So tokens that a forward has beside each other see those behind them, too, and an answer is not computed anew at once.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.stored_mask import stored_mask


def _forward(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None = None,
    layer_state: Any = None,
    attn_mask: torch.Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> Any:
    if not self.encoder_decoder_attention and attn_mask is None:
        attn_mask = stored_mask(layer_state, self.layer_idx, query, query.shape[0])
    return type(self).forward(self, query, key, key_padding_mask, layer_state, attn_mask, output_attentions, **kwargs)


REPLACED = {"Attention.forward": _forward}
ONE_BY_ONE = True
