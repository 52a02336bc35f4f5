"""Gemma 4 has tokens of an image see each other in layers with a window alone.

In Gemma 3 they do in all layers. See ``create_masks_for_vision_model`` of transformers 5.24.
"""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(spans_in="sliding_attention")
