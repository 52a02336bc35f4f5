"""A step of one token is given no mask where all that the cache has is seen, and ours has room that is empty.

LED leaves it out (5.23: `LEDDecoder.forward`). FSMT makes none of its own tokens as soon as there is a cache
(5.23: `FSMTModel.forward`): tokens that a forward has beside each other see those behind them, too, and an answer is
not computed anew at once.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.program.call_signature import cache_in


def stored_mask(cache: Any, layer_idx: int, query: torch.Tensor, num_new: int) -> torch.Tensor | None:
    """Zeros for what a layer of `cache` has stored once `num_new` tokens are, and the least number for what is behind.

    Args:
        cache: as model code has it before the layer's update, or None.
        layer_idx: of the layer.
        query: of the dtype that the mask is to have.
        num_new: tokens of this forward.

    Returns:
        float[num_keys]; None where all keys are stored ones.
    """
    layer = None if cache is None else getattr(cache, "self_attention_cache", cache).layers[layer_idx]
    if layer is None or not layer.is_initialized:
        return None
    positions = torch.arange(layer.get_mask_sizes(num_new)[0])
    least = torch.finfo(query.dtype).min
    return torch.where(positions < layer.get_seq_length() + num_new, 0.0, least).to(query.dtype)


def _fsmt(
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


def _led(
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


METHODS = {"Attention.forward": _fsmt, "LEDDecoderAttention.forward": _led}
TOKEN_BY_TOKEN = frozenset({"fsmt"})
