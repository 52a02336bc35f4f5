"""Doge masks keys by the rank of values that it computes, and reads values by a second product for that rank."""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(mixes_neighbours=True, keeps_value_heads=True)
