"""Types whose own cache changes what they answer: transformers' object goes in and out of their programs, and grows."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

REASONS = {
    "cpmant": "a prompt of embeddings stands in its cache before the text, which without a cache sees all of it",
    "git": "its cache holds the patches of an image before the text",
    "mllama": "its cross attention stores an image's features beside the tokens",
    "prophetnet": "distances are counted otherwise where there is a cache",
    "xlstm": "its cache is no cache of transformers, but the states of its layers, whose shapes stay",
    **dict.fromkeys(
        ("musicgen_decoder", "musicgen_melody_decoder"),
        "its generation gives the last codes alone, with a cache or without, and rows are those of codebooks",
    ),
}

AUDIO_PER_TOKEN = frozenset({"kyutai_speech_to_text", "voxtral_realtime"})
"""Types whose cache takes fixed shapes, which no trial with tokens alone shows: they hear with every token."""


_LENGTHS = frozenset({"past_key_values_length", "cache_length"})
"""Names of the argument for the number of cached tokens, where a table of positions is given it, by release."""


def allows_fixed_shapes(module: torch.nn.Module) -> bool:
    """Whether it is known of `module` that it runs on a cache of fixed shapes."""
    return getattr(getattr(module, "config", None), "model_type", "") in AUDIO_PER_TOKEN


def reason(module: torch.nn.Module) -> str | None:
    """Why `module` keeps transformers' own cache; None where it does not."""
    config = getattr(module, "config", None)
    known = REASONS.get(getattr(config, "model_type", ""))
    if known is None and _stores_the_last(module):
        return "its cache holds the last token of a prompt alone"
    if known is None and getattr(config, "is_decoder", False) and _masks_as_an_encoder(module):
        return "its masks are those of an encoder: a step shows all that its cache has room for"
    if known is None and getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        return "passes through its layers, but for the last, read what its cache has, and store nothing"
    if known is None and generates_as_encoder(module):
        return "it is configured as an encoder: its masks are, and a step sees what its code has put into the cache"
    return known


def generates_as_encoder(module: torch.nn.Module) -> bool:
    """Whether `module` generates under an encoder's masks, which ``is_decoder=False`` asks for.

    Such code returns no cache, and makes none. Some writes into the one that it is given and reads it, such as
    RemBERT's, whose published configuration is such a one; some does neither, and a step sees its own token alone.
    """
    config = getattr(module, "config", None)
    is_encoder = getattr(config, "is_decoder", None) is False and not getattr(config, "is_encoder_decoder", False)
    if not is_encoder or not isinstance(module, PreTrainedModel) or not module.can_generate():
        return False
    return hasattr(sys.modules.get(type(module).__module__), "create_bidirectional_mask")


def _masks_as_an_encoder(module: torch.nn.Module) -> bool:
    """Whether the file of `module` makes masks by transformers' function for encoders alone."""
    file = sys.modules.get(type(module).__module__)
    return hasattr(file, "create_bidirectional_mask") and not hasattr(file, "create_causal_mask")


def _stores_the_last(module: torch.nn.Module) -> bool:
    """Whether `module` is FSMT as on transformers 5.17, which counts no tokens that its cache has."""
    if getattr(getattr(module, "config", None), "model_type", "") != "fsmt" or not isinstance(module, PreTrainedModel):
        return False
    table: Any = module.get_decoder().embed_positions
    return _LENGTHS.isdisjoint(inspect.signature(table.forward).parameters)
