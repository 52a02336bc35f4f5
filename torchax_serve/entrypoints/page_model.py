"""`PageModel`: vectors of each token of images of pages, and of queries (ColPali)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.generation.jax_forward import following
from torchax_serve.multimodal.decode_inputs import in_dtype
from torchax_serve.pooling.batching import checked_texts
from torchax_serve.pooling.multi_vector import maxsim
from torchax_serve.pooling.queue import QueuedTexts, check_wanted
from torchax_serve.tasks.images import images_of, is_single
from torchax_serve.validation.argument_hints import refuses_unknown

CLASSES = ("ColPaliForRetrieval", "ColQwen2ForRetrieval", "ColModernVBertForRetrieval")
"""Classes of transformers whose forward gives `embeddings` of tokens of a page or a query."""


class PageModel(ServedModel):
    """A model that finds pages of documents by their images; made by `serve`.

    Inputs are made by the checkpoint's processor. Each number of tokens of a query has a program.

    Attributes:
        methods: Names of its methods.
    """

    writes_text, embeds = False, False
    methods = ("embed_queries", "embed_pages", "score_pages")

    @refuses_unknown
    def embed_queries(
        self,
        queries: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Any:
        """Returns embeddings of queries: float32[num_tokens, dim] of one, a list of several.

        Args:
            queries: Texts.
            timeout_s: Seconds after which the call ends with an error, looked at before each forward; None: never.
            queue_timeout_s: The same for a call that has not begun by then.

        Raises:
            InvalidArgumentError: no text, or an empty one; the checkpoint has no processor.
            QueueFullError: Too many inputs are waiting.
            DeadlineError: A time limit has passed.
        """
        found = self._embedding_queries(queries).run(timeout_s, queue_timeout_s)
        return found[0] if isinstance(queries, str) else found

    @refuses_unknown
    async def aembed_queries(
        self,
        queries: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Any:
        """Works as `embed_queries` without blocking the event loop; cancelling ends it."""
        found = await self._embedding_queries(queries).run_async(timeout_s, queue_timeout_s)
        return found[0] if isinstance(queries, str) else found

    @refuses_unknown
    def embed_pages(self, pages: Any, *, timeout_s: float | None = None, queue_timeout_s: float | None = None) -> Any:
        """Returns embeddings of pages: float32[num_tokens, dim] of one, a list of several.

        Args:
            pages: Images: paths, PIL images or pixels uint8[height, width, 3].
            timeout_s, queue_timeout_s: As in `embed_queries`.

        Raises:
            InvalidArgumentError: what is no image; the checkpoint has no processor.
            QueueFullError: Too many inputs are waiting.
            DeadlineError: A time limit has passed.
        """
        found = self._embedding_pages(pages).run(timeout_s, queue_timeout_s)
        return found[0] if is_single(pages) else found

    @refuses_unknown
    async def aembed_pages(
        self, pages: Any, *, timeout_s: float | None = None, queue_timeout_s: float | None = None
    ) -> Any:
        """Works as `embed_pages` without blocking the event loop; cancelling ends it."""
        found = await self._embedding_pages(pages).run_async(timeout_s, queue_timeout_s)
        return found[0] if is_single(pages) else found

    @refuses_unknown
    def score_pages(
        self, query: str, pages: Any, *, timeout_s: float | None = None, queue_timeout_s: float | None = None
    ) -> np.ndarray:
        """Returns the scores of pages for a query by MaxSim, float32[num_pages].

        Args:
            query: A text.
            pages: Images, as in `embed_pages`; or their embeddings, a list of float32[num_tokens, dim].
            timeout_s, queue_timeout_s: As in `embed_queries`, of each of both calls.
        """
        limits = {"timeout_s": timeout_s, "queue_timeout_s": queue_timeout_s}
        vectors = self.embed_queries(query, **limits)
        return _scores(vectors, pages if _are_vectors(pages) else self.embed_pages(_as_list(pages), **limits))

    @refuses_unknown
    async def ascore_pages(
        self, query: str, pages: Any, *, timeout_s: float | None = None, queue_timeout_s: float | None = None
    ) -> np.ndarray:
        """Works as `score_pages` without blocking the event loop; cancelling ends it."""
        limits = {"timeout_s": timeout_s, "queue_timeout_s": queue_timeout_s}
        vectors = await self.aembed_queries(query, **limits)
        return _scores(vectors, pages if _are_vectors(pages) else await self.aembed_pages(_as_list(pages), **limits))

    def _embedding_queries(self, queries: str | Sequence[str]) -> QueuedTexts:
        texts = checked_texts(queries)
        if (index := next((i for i, each in enumerate(texts) if not isinstance(each, str)), None)) is not None:
            raise InvalidArgumentError(f"texts[{index}]: expected a text, which the processor frames, got token ids")
        return self._embedding_of("queries", "text", texts)

    def _embedding_pages(self, pages: Any) -> QueuedTexts:
        return self._embedding_of("images", "images", images_of(pages))

    def _embedding_of(self, kind: str, argument: str, items: Sequence[Any]) -> QueuedTexts:
        """Returns the call that embeds items by the processor's method for their kind, on the queue."""
        self._followed()
        if (processor := self._processor()) is None:
            raise InvalidArgumentError(
                f"{self.name} has no processor, which makes the model's inputs; put its files next to the weights"
            )
        read = getattr(processor, f"process_{kind}")

        def call(given: Sequence[Any]) -> list[np.ndarray]:
            found = []
            with following(self.runtime):
                for item in given:
                    check_wanted()
                    found.append(self._vectors(self._read(read, argument, item)))
            return found

        return QueuedTexts(self._pooling_queue, (type(self).__name__, argument), call, list(items))

    def _read(self, read: Callable[..., Any], argument: str, item: Any) -> Any:
        """Returns what the processor makes of an item; raises InvalidArgumentError if it refuses it."""
        try:
            return read(**{argument: [item]}, return_tensors="pt")
        except Exception as error:  # code of processors raises whatever it likes
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidArgumentError(
                f"{'queries' if argument == 'text' else argument}: expected what the processor of {self.name} reads, "
                f"got an error of it ({lines[0]}); give another size or length"
            ) from error

    def _vectors(self, inputs: Any) -> np.ndarray:
        """Returns the embeddings of the tokens that a processor has made of one item."""
        given = {name: value for name, value in inputs.items() if name != "labels"}  # of training
        arguments = in_dtype(given, self.dtype)
        with torch.no_grad():
            found = self._module(**arguments).embeddings[0]
        return np.asarray(found[arguments["attention_mask"][0].bool()].float().numpy())


def _are_vectors(pages: Any) -> bool:
    return isinstance(pages, list) and all(isinstance(each, np.ndarray) and each.ndim == 2 for each in pages)


def _as_list(pages: Any) -> list[Any]:
    return [pages] if is_single(pages) else list(pages)


def _scores(query: np.ndarray, pages: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray([maxsim(query, page) for page in pages], np.float32)
