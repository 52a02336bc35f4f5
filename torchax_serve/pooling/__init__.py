"""Embeddings, labels, and the order of documents: what models that do not generate are asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchax_serve.pooling.classification import Classification, RankedDocument, TokenLabel
    from torchax_serve.pooling.embedding import embed
    from torchax_serve.pooling.methods import POOLINGS

__all__ = ["POOLINGS", "Classification", "RankedDocument", "TokenLabel", "embed"]

_HOME = {
    "POOLINGS": "torchax_serve.pooling.methods",
    "Classification": "torchax_serve.pooling.classification",
    "RankedDocument": "torchax_serve.pooling.classification",
    "TokenLabel": "torchax_serve.pooling.classification",
    "embed": "torchax_serve.pooling.embedding",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value
