"""Embeddings, labels and ranking: the tasks of models that do not generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytree_registry.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from torchax_serve.pooling.classification import Classification, RankedDocument, TokenLabel
    from torchax_serve.pooling.embedding import embed
    from torchax_serve.pooling.methods import POOLINGS

__all__ = ["POOLINGS", "Classification", "RankedDocument", "TokenLabel", "embed"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Classification": ".classification",
        "POOLINGS": ".methods",
        "RankedDocument": ".classification",
        "TokenLabel": ".classification",
        "embed": ".embedding",
    },
)
