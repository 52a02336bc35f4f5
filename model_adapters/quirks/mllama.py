"""Mllama's cross attention stores an image's features in the cache of the tokens.

Its text decoder has no images.
"""

from __future__ import annotations

from typing import Any

from model_adapters.quirks.quirk import Quirk


def _has_images(module: Any) -> bool:
    return bool(module.config.model_type == "mllama")


QUIRK = Quirk(
    native_cache_reason="its cross attention stores an image's features beside the tokens", native_cache_if=_has_images
)
