"""Methods of models that retrieve texts: sparse embeddings. They need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchax_serve.entrypoints.text_methods import EmbedsTexts
from torchax_serve.pooling.batching import Text, checked_texts
from torchax_serve.pooling.queue import QueuedTexts
from torchax_serve.pooling.sparse import SparseEmbedding
from torchax_serve.pooling.sparse import embed_sparse as sparse_embeddings


class RetrievesTexts(EmbedsTexts):
    """A model with embeddings for retrieval, if the checkpoint's files describe them."""

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
