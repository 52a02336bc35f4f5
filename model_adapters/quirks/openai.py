"""OpenAI's first GPT has its causal mask in a buffer, and calls no mask function.

The buffer is one of its attention; the mask functions are those of transformers.
"""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(causal_without_mask=True)
