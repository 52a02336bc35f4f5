"""CPM-Ant's cache begins with the embeddings of a soft prompt, which its forward without a cache attends to fully."""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(
    native_cache_reason=(
        "a prompt of embeddings stands in its cache before the text, which without a cache sees all of it"
    )
)
