"""Scores of pairs of texts by embeddings, as sentence-transformers' `similarity` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from torchax_serve.pooling.embedding import Embedder, embed
from torchax_serve.pooling.multi_vector import Task, embed_tokens, maxsim

SIMILARITIES: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "cosine": lambda a, b: float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12)),
    "dot": lambda a, b: float(a @ b),
    "euclidean": lambda a, b: -float(np.linalg.norm(a - b)),
    "manhattan": lambda a, b: -float(np.abs(a - b).sum()),
}
"""Similarity of two embeddings float32[dim], by its name in a checkpoint's files."""
LATE: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "maxsim": maxsim,
    "meanmaxsim": lambda query, document: maxsim(query, document) / max(1, len(query)),
}
"""The same of two sets of embeddings float32[num_tokens, dim], of a query and a document."""


def score_pairs(
    embedder: Embedder, pairs: Sequence[tuple[str, str]], *, truncate: bool | int | None = None
) -> np.ndarray:
    """Returns the similarity of pairs of a query and a document, float32[num_pairs].

    Queries and documents have the prompts of these names. Each text is embedded once.

    Args:
        embedder: By the checkpoint's files.
        pairs: The texts.
        truncate: As of `embedding.embed`.
    """
    queries = _embedded(embedder, [query for query, _ in pairs], "query", truncate)
    documents = _embedded(embedder, [document for _, document in pairs], "document", truncate)
    score = similarity_of(embedder)
    return np.asarray([score(queries[query], documents[document]) for query, document in pairs], np.float32)


def similarity_of(embedder: Embedder) -> Callable[[np.ndarray, np.ndarray], float]:
    """Returns the similarity that a checkpoint's files name, or that of its kind of embeddings."""
    named = embedder.rule.similarity
    if embedder.tokens is not None:
        return LATE.get(named or "", LATE["maxsim"])
    return SIMILARITIES.get(named or "", SIMILARITIES["dot" if embedder.is_sparse else "cosine"])


def _embedded(
    embedder: Embedder, texts: Sequence[str], task: Task, truncate: bool | int | None
) -> dict[str, np.ndarray]:
    """Returns the embeddings of different texts, by text."""
    different = list(dict.fromkeys(texts))
    if embedder.tokens is not None:
        return dict(zip(different, embed_tokens(embedder, different, task=task, truncate=truncate), strict=True))
    return dict(zip(different, embed(embedder, different, prompt_name=task, truncate=truncate), strict=True))
