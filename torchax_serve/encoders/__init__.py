"""Embeddings, labels, and the order of documents: what models that do not generate are asked for."""

from torchax_serve.encoders.embedding import embed
from torchax_serve.encoders.labels import Classification, RankedDocument, TokenLabel
from torchax_serve.encoders.rules import POOLINGS

__all__ = ["POOLINGS", "Classification", "RankedDocument", "TokenLabel", "embed"]
