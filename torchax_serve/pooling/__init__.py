"""Embeddings, labels and ranking: the tasks of models that do not generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytree_registry.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from torchax_serve.pooling.classification import Classification, RankedDocument, TokenLabel
    from torchax_serve.pooling.embedding import embed
    from torchax_serve.pooling.methods import POOLINGS
    from torchax_serve.pooling.sparse import SparseEmbedding

__all__ = ["POOLINGS", "Classification", "RankedDocument", "SparseEmbedding", "TokenLabel", "embed"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Classification": ".classification",
        "POOLINGS": ".methods",
        "RankedDocument": ".classification",
        "SparseEmbedding": ".sparse",
        "TokenLabel": ".classification",
        "embed": ".embedding",
    },
)
