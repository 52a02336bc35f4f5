"""Sparse embeddings of texts: weights of few tokens of the vocabulary, by SPLADE."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.pooling.batching import Text
from torchax_serve.pooling.embedding import Embedder, embed


@dataclasses.dataclass(frozen=True, eq=False)
class SparseEmbedding:
    """A sparse embedding of a text.

    Attributes:
        indices: int32[num_active], token ids of the vocabulary, ascending.
        values: float32[num_active], their weights, none of them 0.
    """

    indices: np.ndarray
    values: np.ndarray

    def dot(self, other: SparseEmbedding) -> float:
        """Returns the inner product with another embedding, the score of a query and a document."""
        _, mine, theirs = np.intersect1d(self.indices, other.indices, assume_unique=True, return_indices=True)
        return float(self.values[mine] @ other.values[theirs])


def embed_sparse(
    embedder: Embedder,
    texts: Sequence[Text],
    *,
    prompt: str | None = None,
    prompt_name: str | None = None,
    truncate: bool | int | None = None,
    max_active_dims: int | None = None,
) -> list[SparseEmbedding]:
    """Returns sparse embeddings of texts; arguments and errors are as of `embedding.embed`.

    Args:
        embedder: Of a checkpoint with a SPLADE pooling.
        texts: Texts, or their token ids.
        prompt: See `embedding.embed`, and so `prompt_name` and `truncate`.
        max_active_dims: Most values of an embedding, the largest; None follows the checkpoint's files.
    """
    if not embedder.is_sparse:
        raise UnsupportedModelError(
            f"embed_sparse: expected a model with SpladePooling in its modules.json, got {embedder.name}, whose "
            "embeddings are dense; call embed()"
        )
    if max_active_dims is not None and (type(max_active_dims) is not int or max_active_dims < 1):
        raise InvalidArgumentError(f"max_active_dims: expected a positive number, got {max_active_dims!r}")
    found = embed(
        embedder,
        texts,
        prompt=prompt,
        prompt_name=prompt_name,
        truncate=truncate,
        max_active_dims=max_active_dims,
    )
    return [sparse_of(row) for row in found]


def sparse_of(row: np.ndarray) -> SparseEmbedding:
    """Returns the sparse form of a dense embedding float32[vocab_size]."""
    (indices,) = np.nonzero(row)
    return SparseEmbedding(indices.astype(np.int32), row[indices])
