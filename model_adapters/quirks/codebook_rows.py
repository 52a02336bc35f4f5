"""MusicGen's decoders have a row per codebook; ``generate`` returns only the last codes."""

from __future__ import annotations

from typing import Any

from model_adapters.quirks.quirk import Quirk


def _is_decoder(module: Any) -> bool:
    return str(module.config.model_type).endswith("_decoder")


QUIRK = Quirk(
    native_cache_reason=(
        "its generation gives the last codes alone, with a cache or without, and rows are those of codebooks"
    ),
    native_cache_if=_is_decoder,
)
