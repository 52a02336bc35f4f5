"""Embeddings, labels, and the order of documents: what models that do not generate are asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchax_serve.encoders.embedding import embed
    from torchax_serve.encoders.labels import Classification, RankedDocument, TokenLabel
    from torchax_serve.encoders.rules import POOLINGS

__all__ = ["POOLINGS", "Classification", "RankedDocument", "TokenLabel", "embed"]

_HOME = {
    "POOLINGS": "rules",
    "Classification": "labels",
    "RankedDocument": "labels",
    "TokenLabel": "labels",
    "embed": "embedding",
}


def __getattr__(name: str) -> Any:
    # The command line checks `POOLINGS` before torch and jax are imported.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
