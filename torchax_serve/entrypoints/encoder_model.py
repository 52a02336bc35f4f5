"""What `serve` returns for a model that does not generate: it embeds, classifies and ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.pooling import classification
from torchax_serve.pooling.batching import Text
from torchax_serve.pooling.classification import Classification, RankedDocument, TokenLabel


class EncoderModel(ServedModel):
    """A model of texts that gives embeddings (`embed`) or labels; made by `serve`. It does not generate."""

    def classify(self, texts: str | Sequence[Text], *, truncate: bool = False) -> Classification | list[Classification]:
        """Labels of texts, with scores as transformers' ``text-classification`` pipeline has them.

        Args:
            texts: one, or several; token ids may stand in a text's place.
            truncate: cut texts that are too long, in place of an error.

        Raises:
            UnsupportedModelError: the model has no head that classifies texts.
            InvalidArgumentError: no text, an empty one, or one that is too long.
        """
        return classification.classify(self._followed(), self._runtimes[0], texts, truncate=truncate)

    def classify_tokens(
        self, texts: str | Sequence[Text], *, truncate: bool = False
    ) -> list[TokenLabel] | list[list[TokenLabel]]:
        """Labels of each token of texts, special tokens left out; arguments and errors as those of `classify`."""
        return classification.classify_tokens(self._followed(), self._runtimes[0], texts, truncate=truncate)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_k: int | None = None, truncate: bool | None = None
    ) -> list[RankedDocument]:
        """Documents in the order of their scores for `query`, the best first; a cross-encoder reads both together.

        Args:
            query: a text.
            documents: texts.
            top_k: how many are returned; None: all.
            truncate: cut pairs that are too long, the longer text first (True), or refuse them (False). None: cut them
                as sentence-transformers does, with one line that says so.

        Raises:
            UnsupportedModelError: the model is no cross-encoder with one score.
            InvalidArgumentError: no query, no documents, or a pair that is too long.
        """
        return classification.rerank(
            self._followed(), self._runtimes[0], query, documents, top_k=top_k, truncate=truncate
        )
