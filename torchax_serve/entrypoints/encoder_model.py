"""`EncoderModel`: embeds, classifies and ranks texts.

`serve` returns it for a model that does not generate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.pooling import classification
from torchax_serve.pooling.batching import Text
from torchax_serve.pooling.classification import Classification, RankedDocument, TokenLabel


class EncoderModel(ServedModel):
    """Text model that returns embeddings (`embed`), labels or scores; made by `serve`.

    It does not generate.
    """

    writes_text = False

    def classify(self, texts: str | Sequence[Text], *, truncate: bool = False) -> Classification | list[Classification]:
        """Returns labels of texts with scores.

        The scores are those of transformers' ``text-classification`` pipeline.

        Args:
            texts: one text or several; a list of token ids may replace a text.
            truncate: cut texts that are too long instead of raising.

        Raises:
            UnsupportedModelError: the model has no head that classifies texts.
            InvalidArgumentError: no text, an empty one, or one that is too long.
        """
        return classification.classify(self._followed(), self._runtimes[0], texts, truncate=truncate)

    def classify_tokens(
        self, texts: str | Sequence[Text], *, truncate: bool = False
    ) -> list[TokenLabel] | list[list[TokenLabel]]:
        """Returns a label per token, special tokens left out; arguments and errors as in `classify`."""
        return classification.classify_tokens(self._followed(), self._runtimes[0], texts, truncate=truncate)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_k: int | None = None, truncate: bool | None = None
    ) -> list[RankedDocument]:
        """Returns documents by their score for `query`, the best first; for cross-encoders.

        Args:
            query: a text.
            documents: texts.
            top_k: number of documents to return; None returns all.
            truncate: cut pairs that are too long, the longer text first (True), or raise (False). None cuts them as
                sentence-transformers does and logs a warning.

        Raises:
            UnsupportedModelError: the model is not a cross-encoder with one score.
            InvalidArgumentError: no query, no documents, or a pair that is too long.
        """
        return classification.rerank(
            self._followed(), self._runtimes[0], query, documents, top_k=top_k, truncate=truncate
        )

    def score_pairs(self, pairs: Sequence[tuple[str, str]], *, truncate: bool | None = None) -> np.ndarray:
        """Returns the scores of pairs of a query and a document, float32[num_pairs]; see `rerank`."""
        return classification.score_pairs(self._followed(), self._runtimes[0], pairs, truncate=truncate)
