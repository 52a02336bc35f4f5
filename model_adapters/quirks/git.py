"""GIT has an image's patches in its cache before the text, and shifts later masks by them.

The mask of later tokens is shifted by the number of patches. With the shifted mask, later tokens see what padding on
the left has computed: a mean over the prompt and its padding on the right.
"""

from __future__ import annotations

from model_adapters.quirks.quirk import Quirk

QUIRK = Quirk(shifted_mask=True, native_cache_reason="its cache holds the patches of an image before the text")
