"""Moonshine's encoder returns a mask of its outputs, which the decoder reads.

The mask is `encoder_outputs.attention_mask`. Canary and Cohere's speech model do the same.
"""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(encoder_returns_mask=True)
