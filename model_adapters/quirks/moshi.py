"""Moshi's masks show every token, while its cache holds only those of a window.

Steps see the window, prompts see all.
"""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(unmasked_sliding_cache=True)
