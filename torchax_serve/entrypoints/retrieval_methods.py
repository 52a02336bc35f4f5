"""Methods of models that retrieve texts: sparse and multi-vector embeddings, scores, ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchax_serve.entrypoints.text_methods import EmbedsTexts
from torchax_serve.pooling.queue import QueuedTexts

if TYPE_CHECKING:  # imported by the calls that need them: a start of a language model is quicker
    from torchax_serve.pooling.batching import Text
    from torchax_serve.pooling.classification import RankedDocument
    from torchax_serve.pooling.multi_vector import Task
    from torchax_serve.pooling.sparse import SparseEmbedding


class RetrievesTexts(EmbedsTexts):
    """A model with embeddings for retrieval, if the checkpoint's files describe them.

    Attributes:
        scores_by_logits: Whether the files say by which tokens' logits a model that generates scores pairs.
    """

    scores_by_logits = False

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """Names of the checkpoint's prompts; none without files that say how it embeds texts."""
        return tuple(self._embedder(chooses=False).rule.prompts) if self.embeds_by_files else ()

    @property
    def embeds_tokens(self) -> bool:
        """Whether the files say that each token has an embedding (ColBERT)."""
        return self.embeds_by_files and self._embedder(chooses=False).tokens is not None

    def embed_sparse(
        self,
        texts: str | Sequence[Text],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool | int | None = None,
        max_active_dims: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> SparseEmbedding | list[SparseEmbedding]:
        """Returns sparse embeddings of texts: token ids and their weights, by SPLADE.

        Args:
            texts: one text or several; a list of token ids may replace a text.
            prompt: text in front of each text.
            prompt_name: name of one of the checkpoint's prompts, in place of `prompt`.
            truncate: as in `embed`.
            max_active_dims: most values of an embedding, the largest; None follows the checkpoint's files.
            timeout_s: as in `embed`.
            queue_timeout_s: as in `embed`.

        Raises:
            UnsupportedModelError: the checkpoint's files have no SPLADE pooling.
            InvalidArgumentError: an empty or too long text; an unknown prompt.
            QueueFullError: too many texts are waiting.
            DeadlineError: a time limit has passed.
        """
        call = self._sparse_call(texts, prompt, prompt_name, truncate, max_active_dims)
        found = call.run(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    async def aembed_sparse(
        self,
        texts: str | Sequence[Text],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool | int | None = None,
        max_active_dims: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> SparseEmbedding | list[SparseEmbedding]:
        """Works as `embed_sparse` without blocking the event loop."""
        call = self._sparse_call(texts, prompt, prompt_name, truncate, max_active_dims)
        found = await call.run_async(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    def _sparse_call(
        self,
        texts: str | Sequence[Text],
        prompt: str | None,
        prompt_name: str | None,
        truncate: bool | int | None,
        max_active_dims: int | None,
    ) -> QueuedTexts:
        from torchax_serve.pooling.batching import checked_texts
        from torchax_serve.pooling.sparse import embed_sparse as sparse_embeddings

        self._followed()
        options: dict[str, Any] = {
            "prompt": prompt,
            "prompt_name": prompt_name,
            "truncate": truncate,
            "max_active_dims": max_active_dims,
        }

        def call(items: Sequence[Any]) -> list[SparseEmbedding]:
            return sparse_embeddings(self._embedder(chooses=False), items, **options)

        key = ("embed_sparse", type(truncate), *options.values())
        return QueuedTexts(self._pooling_queue, key, call, checked_texts(texts))

    def embed_tokens(
        self,
        texts: str | Sequence[Text],
        *,
        task: Task = "document",
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool | int | None = None,
        normalize: bool | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """Returns embeddings of the tokens of texts: float32[num_tokens, dim] of each.

        Those of a multi-vector model (ColBERT) are as its files say, which read queries and documents differently. Of
        other models they are the hidden states of all tokens.

        Args:
            texts: one text or several; a list of token ids may replace a text.
            task: "query" or "document".
            prompt: text in front of each text.
            prompt_name: name of one of the checkpoint's prompts, in place of `prompt`; None: of a multi-vector model
                that of the task.
            truncate: as in `embed`.
            normalize: scale each embedding to length 1; None follows the checkpoint's files.
            timeout_s: as in `embed`.
            queue_timeout_s: as in `embed`.

        Raises:
            InvalidArgumentError: an unknown task or prompt; an empty or too long text.
            UnsupportedModelError: the model gives no hidden states, or its embeddings are sparse.
            QueueFullError: too many texts are waiting.
            DeadlineError: a time limit has passed.
        """
        call = self._token_call(texts, task, prompt, prompt_name, truncate, normalize)
        found = call.run(timeout_s, queue_timeout_s)
        return np.asarray(found[0]) if isinstance(texts, str) else found

    async def aembed_tokens(
        self,
        texts: str | Sequence[Text],
        *,
        task: Task = "document",
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool | int | None = None,
        normalize: bool | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """Works as `embed_tokens` without blocking the event loop."""
        call = self._token_call(texts, task, prompt, prompt_name, truncate, normalize)
        found = await call.run_async(timeout_s, queue_timeout_s)
        return np.asarray(found[0]) if isinstance(texts, str) else found

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        truncate: bool | int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[RankedDocument]:
        """Returns documents by their score for `query`, the best first.

        The score is that of a cross-encoder, or of other models what the checkpoint's files say: the similarity of
        embeddings (cosine of one for each text, MaxSim of one for each token), or the logits of yes and no.

        Args:
            query: a text.
            documents: texts.
            top_k: number of documents to return; None returns all.
            truncate: cut what is too long, of pairs the longer text first (True; a number: to so many tokens), or raise
                (False). None cuts as sentence-transformers does and logs a warning.
            timeout_s: as in `embed`.
            queue_timeout_s: as in `embed`.

        Raises:
            UnsupportedModelError: the model is no cross-encoder with one score, and no files say how it embeds texts.
            InvalidArgumentError: no query, no documents, or a pair that is too long.
            QueueFullError: too many texts are waiting.
            DeadlineError: a time limit has passed.
        """
        from torchax_serve.pooling import classification

        limits: dict[str, Any] = {"timeout_s": timeout_s, "queue_timeout_s": queue_timeout_s}
        score = functools.partial(self.score_pairs, truncate=truncate, **limits)
        self._check_scores()
        return classification.rerank(query, documents, top_k=top_k, score_pairs=score)

    def score_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: bool | int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray:
        """Returns the scores of pairs of a query and a document, float32[num_pairs]; see `rerank`."""
        call = self._scoring(pairs, truncate)
        return np.asarray(call.run(timeout_s, queue_timeout_s), np.float32)

    async def ascore_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: bool | int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray:
        """Works as `score_pairs`, without blocking the event loop."""
        call = self._scoring(pairs, truncate)
        return np.asarray(await call.run_async(timeout_s, queue_timeout_s), np.float32)

    def _token_call(
        self,
        texts: str | Sequence[Text],
        task: Task,
        prompt: str | None,
        prompt_name: str | None,
        truncate: bool | int | None,
        normalize: bool | None,
    ) -> QueuedTexts:
        from torchax_serve.pooling.batching import checked_texts
        from torchax_serve.pooling.multi_vector import embed_tokens as token_embeddings

        self._followed()
        options: dict[str, Any] = {
            "task": task,
            "prompt": prompt,
            "prompt_name": prompt_name,
            "truncate": truncate,
            "normalize": normalize,
        }

        def call(items: Sequence[Any]) -> list[np.ndarray]:
            return token_embeddings(self._embedder(chooses=not self.embeds_by_files), items, **options)

        key = ("embed_tokens", type(truncate), *options.values())
        return QueuedTexts(self._pooling_queue, key, call, checked_texts(texts))

    @property
    def _is_cross_encoder(self) -> bool:
        """Whether the model reads a query and a document together."""
        from torchax_serve.pooling.classification import HEADS

        return self.class_name.endswith(HEADS["rerank"])

    def _check_scores(self) -> None:
        """Raises UnsupportedModelError for a model without scores of pairs."""
        from torchax_serve.pooling import classification

        if not self.embeds_by_files and not self.scores_by_logits:
            classification.require(self._head(), "rerank")

    def _scores_of_pairs(self, pairs: Sequence[tuple[str, str]], truncate: bool | int | None) -> np.ndarray:
        """Returns float32[num_pairs]."""
        from torchax_serve.pooling import classification, similarity

        if self._is_cross_encoder or not self.embeds_by_files:
            return classification.score_pairs(self._head(), pairs, truncate=truncate)
        return similarity.score_pairs(self._embedder(chooses=False), pairs, truncate=truncate)

    def _scoring(self, pairs: Sequence[tuple[str, str]], truncate: bool | int | None) -> QueuedTexts:
        self._followed()

        def call(items: Sequence[Any]) -> np.ndarray:
            return self._scores_of_pairs(items, truncate)

        return QueuedTexts(self._pooling_queue, ("score_pairs", type(truncate), truncate), call, list(pairs))
