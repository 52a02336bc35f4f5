"""FSMT makes no mask of its own tokens as soon as there is a cache.

See `FSMTModel.forward` of transformers 5.23. A cache of fixed shapes has free capacity, which must be masked. Tokens of
one forward see later ones, so a sequence goes on one token per forward. On transformers 5.17 its positional embedding
gets no number of cached tokens: only the last token of a prompt is stored.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from model_adapters.quirks.missing_step_mask import stored_mask
from model_adapters.quirks.quirk import Quirk

# Names of the argument for the number of cached tokens, by release.
_CACHED_LENGTH_NAMES = frozenset({"past_key_values_length", "cache_length"})


def _attention(
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


def _stores_last_token_only(module: Any) -> bool:
    if not isinstance(module, PreTrainedModel):
        return False
    table: Any = module.get_decoder().embed_positions
    return _CACHED_LENGTH_NAMES.isdisjoint(inspect.signature(table.forward).parameters)


QUIRK = Quirk(
    methods={"Attention.forward": _attention},
    token_by_token=True,
    native_cache_reason="its cache holds the last token of a prompt alone",
    native_cache_if=_stores_last_token_only,
)
