"""MobileBERT concatenates the embeddings of neighbouring tokens, padding among them."""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(mixes_neighbours=True)
