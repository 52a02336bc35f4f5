"""CPM-Ant's cache begins with a soft prompt, which forwards without cache attend to fully.

The cache has the embeddings of the soft prompt.
"""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(
    native_cache_reason=(
        "a prompt of embeddings stands in its cache before the text, which without a cache sees all of it"
    )
)
