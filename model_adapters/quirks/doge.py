"""Doge ranks keys by a second product of the values, and masks keys by that rank."""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(mixes_neighbours=True, keeps_value_heads=True)
