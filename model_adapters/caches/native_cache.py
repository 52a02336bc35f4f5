"""The models that keep transformers' own cache: the general rules and the quirks.

Their results depend on that cache. Transformers' cache is an argument and a result of the programs and grows, with
one program per length.
"""

from __future__ import annotations

import sys

import torch
from transformers import PreTrainedModel

from model_adapters import quirks


def allows_fixed_shapes(module: torch.nn.Module) -> bool:
    """Tells whether `module` is known to run on a cache of fixed shapes, without a probe."""
    return quirks.of(module).fixed_cache_is_safe


def reason(module: torch.nn.Module) -> str | None:
    """Returns why `module` keeps transformers' own cache; None if it does not."""
    if (known := quirks.of(module).native_cache_reason_of(module)) is not None:
        return known
    config = getattr(module, "config", None)
    if getattr(config, "is_decoder", False) and _masks_as_an_encoder(module):
        return "its masks are those of an encoder: a step shows all that its cache has room for"
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        return "passes through its layers, but for the last, read what its cache has, and store nothing"
    if generates_as_encoder(module):
        return "it is configured as an encoder: its masks are, and a step sees what its code has put into the cache"
    return None


def generates_as_encoder(module: torch.nn.Module) -> bool:
    """Tells whether `module` generates with an encoder's masks, due to ``is_decoder=False``.

    Such code returns no cache and makes none. Some of it, such as RemBERT's with its published configuration, writes
    into a cache that it is given and reads it; some of it does neither, and a step sees only its own token.
    """
    config = getattr(module, "config", None)
    is_encoder = getattr(config, "is_decoder", None) is False and not getattr(config, "is_encoder_decoder", False)
    if not is_encoder or not isinstance(module, PreTrainedModel) or not module.can_generate():
        return False
    return hasattr(sys.modules.get(type(module).__module__), "create_bidirectional_mask")


def _masks_as_an_encoder(module: torch.nn.Module) -> bool:
    """Tells whether the file of `module` has transformers' mask function for encoders only."""
    file = sys.modules.get(type(module).__module__)
    return hasattr(file, "create_bidirectional_mask") and not hasattr(file, "create_causal_mask")
