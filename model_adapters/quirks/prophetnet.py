"""ProphetNet computes relative positions in another way once there is a cache."""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(native_cache_reason="distances are counted otherwise where there is a cache")
