"""Pix2Struct's decoder gets the mask over patches, which are as many as outputs."""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(encoder_mask=lambda config: (1, 1, 0))
