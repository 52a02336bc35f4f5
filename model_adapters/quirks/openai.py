"""OpenAI's first GPT has a causal mask in a buffer of its attention and calls none of transformers' mask functions."""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(causal_without_mask=True)
