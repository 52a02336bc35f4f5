"""`EncoderModel`: embeds, classifies and ranks texts.

`serve` returns it for a model that does not generate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.pooling import classification
from torchax_serve.pooling.batching import Text, checked_texts
from torchax_serve.pooling.classification import Classification, RankedDocument, TokenLabel
from torchax_serve.pooling.queue import QueuedTexts


class EncoderModel(ServedModel):
    """Text model that returns embeddings (`embed`), labels or scores; made by `serve`.

    It does not generate.
    """

    writes_text = False

    def classify(
        self,
        texts: str | Sequence[Text],
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Classification | list[Classification]:
        """Returns labels of texts with scores.

        The scores are those of transformers' ``text-classification`` pipeline.

        Args:
            texts: one text or several; a list of token ids may replace a text.
            truncate: cut texts that are too long instead of raising.
            timeout_s: as in `embed`.
            queue_timeout_s: as in `embed`.

        Raises:
            UnsupportedModelError: the model has no head that classifies texts.
            InvalidArgumentError: no text, an empty one, or one that is too long.
            QueueFullError: too many texts are waiting.
            DeadlineError: a time limit has passed.
        """
        found = self._call(classification.classify, checked_texts(texts), truncate).run(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    async def aclassify(
        self,
        texts: str | Sequence[Text],
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Classification | list[Classification]:
        """Works as `classify`, without blocking the event loop."""
        call = self._call(classification.classify, checked_texts(texts), truncate)
        found = await call.run_async(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    def classify_tokens(
        self,
        texts: str | Sequence[Text],
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[TokenLabel] | list[list[TokenLabel]]:
        """Returns a label per token, special tokens left out; arguments and errors as in `classify`."""
        call = self._call(classification.classify_tokens, checked_texts(texts), truncate)
        found = call.run(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    async def aclassify_tokens(
        self,
        texts: str | Sequence[Text],
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[TokenLabel] | list[list[TokenLabel]]:
        """Works as `classify_tokens`, without blocking the event loop."""
        call = self._call(classification.classify_tokens, checked_texts(texts), truncate)
        found = await call.run_async(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        truncate: bool | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[RankedDocument]:
        """Returns documents by their score for `query`, the best first; for cross-encoders.

        Args:
            query: a text.
            documents: texts.
            top_k: number of documents to return; None returns all.
            truncate: cut pairs that are too long, the longer text first (True), or raise (False). None cuts them as
                sentence-transformers does and logs a warning.
            timeout_s: as in `embed`.
            queue_timeout_s: as in `embed`.

        Raises:
            UnsupportedModelError: the model is not a cross-encoder with one score.
            InvalidArgumentError: no query, no documents, or a pair that is too long.
            QueueFullError: too many texts are waiting.
            DeadlineError: a time limit has passed.
        """
        limits: dict[str, Any] = {"timeout_s": timeout_s, "queue_timeout_s": queue_timeout_s}
        score = functools.partial(self.score_pairs, truncate=truncate, **limits)
        return classification.rerank(
            self._followed(), self._runtimes[0], query, documents, top_k=top_k, score_pairs=score
        )

    def score_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: bool | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray:
        """Returns the scores of pairs of a query and a document, float32[num_pairs]; see `rerank`."""
        call = self._call(classification.score_pairs, pairs, truncate)
        return np.asarray(call.run(timeout_s, queue_timeout_s), np.float32)

    async def ascore_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: bool | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray:
        """Works as `score_pairs`, without blocking the event loop."""
        call = self._call(classification.score_pairs, pairs, truncate)
        return np.asarray(await call.run_async(timeout_s, queue_timeout_s), np.float32)

    def _call(self, function: Callable[..., Any], items: Sequence[Any], truncate: bool | None) -> QueuedTexts:
        call = functools.partial(function, self._followed(), self._runtimes[0], truncate=truncate)
        return QueuedTexts(self._pooling_queue, (function.__name__, truncate), call, list(items))
