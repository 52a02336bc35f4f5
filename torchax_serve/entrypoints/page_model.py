"""`PageModel`: vectors of each token of images of pages, and of queries (ColPali, ColQwen2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.generation.jax_forward import following
from torchax_serve.multimodal.decode_inputs import in_dtype
from torchax_serve.pooling.batching import checked_texts
from torchax_serve.pooling.multi_vector import maxsim
from torchax_serve.pooling.queue import QueuedTexts
from torchax_serve.tasks.images import images_of, is_single

CLASSES = ("ColPaliForRetrieval", "ColQwen2ForRetrieval")
"""Classes of transformers whose forward gives `embeddings` of tokens of a page or a query."""


class PageModel(ServedModel):
    """A model that finds pages of documents by their images; made by `serve`.

    Inputs are made by the checkpoint's processor. Each number of tokens of a query has a program.

    Attributes:
        methods: Names of its methods.
    """

    writes_text, embeds = False, False
    methods = ("embed_queries", "embed_pages", "score_pages")

    def embed_queries(self, queries: str | Sequence[str], *, timeout_s: float | None = None) -> Any:
        """Returns embeddings of queries: float32[num_tokens, dim] of one, a list of several.

        Args:
            queries: Texts.
            timeout_s: Seconds after which the call ends with an error, looked at before each forward; None: never.

        Raises:
            InvalidArgumentError: no text, or an empty one; the checkpoint has no processor.
            DeadlineError: the time limit has passed.
        """
        found = self._embedding_of("text", checked_texts(queries)).run(timeout_s)
        return found[0] if isinstance(queries, str) else found

    def embed_pages(self, pages: Any, *, timeout_s: float | None = None) -> Any:
        """Returns embeddings of pages: float32[num_tokens, dim] of one, a list of several.

        Args:
            pages: Images: paths, PIL images or pixels uint8[height, width, 3].
            timeout_s: As in `embed_queries`.

        Raises:
            InvalidArgumentError: what is no image; the checkpoint has no processor.
            DeadlineError: the time limit has passed.
        """
        found = self._embedding_of("images", images_of(pages)).run(timeout_s)
        return found[0] if is_single(pages) else found

    def score_pages(self, query: str, pages: Any, *, timeout_s: float | None = None) -> np.ndarray:
        """Returns the scores of pages for a query by MaxSim, float32[num_pages].

        Args:
            query: A text.
            pages: Images, as in `embed_pages`; or their embeddings, a list of float32[num_tokens, dim].
            timeout_s: As in `embed_queries`, of each of both calls.
        """
        vectors = self.embed_queries(query, timeout_s=timeout_s)
        has_vectors = isinstance(pages, list) and all(isinstance(each, np.ndarray) and each.ndim == 2 for each in pages)
        rows = pages if has_vectors else self.embed_pages(list(pages), timeout_s=timeout_s)
        return np.asarray([maxsim(vectors, row) for row in rows], np.float32)

    def _embedding_of(self, argument: str, items: Sequence[Any]) -> QueuedTexts:
        self._followed()
        processor = self._processor()
        if processor is None:
            raise InvalidArgumentError(
                f"{self.name} has no processor, which makes the model's inputs; put its files next to the weights"
            )

        def call(given: Sequence[Any]) -> list[np.ndarray]:
            with following(self.runtime):
                return [self._vectors(processor(**{argument: [item]}, return_tensors="pt")) for item in given]

        return QueuedTexts(self._pooling_queue, (type(self).__name__, argument), call, list(items))

    def _vectors(self, inputs: Any) -> np.ndarray:
        """Returns the embeddings of the tokens that a processor has made of one item."""
        given = {name: value for name, value in inputs.items() if name != "labels"}  # of training
        arguments = in_dtype(given, self.dtype)
        with torch.no_grad():
            found = self._module(**arguments).embeddings[0]
        return np.asarray(found[arguments["attention_mask"][0].bool()].float().numpy())
