"""FlauBERT's lengths are read on the host as XLM's are."""

from __future__ import annotations

from model_adapters.quirks.xlm import with_known_lengths

REPLACED = {"FlaubertModel.forward": with_known_lengths}
