"""xLSTM's cache is the states of its layers, and its forward never reads a mask.

The cache is not one of transformers; the mask is the attention mask.
"""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(
    ignored_arguments=frozenset({"attention_mask"}),
    native_cache_reason="its cache is no cache of transformers, but the states of its layers, whose shapes stay",
)
