"""Methods of models that read texts: embeddings, labels, scores. They need no torch."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.progress import Progress, SilentProgress
from torchax_serve.pooling.queue import PoolingQueue, QueuedTexts

if TYPE_CHECKING:  # imported by the calls that need them: a start of a language model is quicker
    from torchax_serve.pooling.batching import Text
    from torchax_serve.pooling.classification import Classification, TextHead, TokenLabel
    from torchax_serve.pooling.embedding import Embedder


class EmbedsTexts(abc.ABC):
    """A model with embeddings of texts.

    Attributes:
        class_name: Class of its transformers model.
        embeds_by_files: Whether the checkpoint's files say how tokens become one embedding (``modules.json``).
    """

    class_name: str
    embeds_by_files: bool
    _pooling_queue: PoolingQueue

    @abc.abstractmethod
    def _followed(self) -> Any:
        """Raises TorchaxServeError if the model is closed; takes over changes of its module."""

    @abc.abstractmethod
    def _embedder(self, *, chooses: bool) -> Embedder:
        """Returns the embedder by the checkpoint's files, or one whose requests choose the pooling."""

    @abc.abstractmethod
    def _head(self) -> TextHead:
        """Returns the model as one that labels texts."""

    @property
    @abc.abstractmethod
    def _is_closed(self) -> bool:
        """Whether the model was closed."""

    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool | int | None = None,
        truncate_dim: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray:
        """Returns embeddings of texts: float32[dim] of one, float32[num_texts, dim] of a list.

        Texts of several threads that wait are embedded together.

        Args:
            texts: one text or several; a list of token ids may replace a text.
            pooling: one of `torchax_serve.pooling.POOLINGS`, such as "mean"; None follows the checkpoint's files.
            normalize: scale each embedding to length 1; None follows the checkpoint's files.
            prompt: text in front of each text.
            prompt_name: name of one of the checkpoint's prompts, in place of `prompt`.
            truncate: cut texts that are too long (True) or raise (False); a number: cut them to so many tokens. None
                follows the checkpoint's files.
            truncate_dim: number of leading values of each embedding to return; None follows the checkpoint's files.
            timeout_s: seconds after which the call ends with an error, looked at before each forward; None: never.
            queue_timeout_s: the same for a call that has not begun by then.

        Raises:
            InvalidArgumentError: no pooling is known; an empty or too long text; an unknown prompt.
            CheckpointError: the checkpoint's files about embeddings are not readable.
            UnsupportedModelError: the model gives no hidden states, or its files ask for what is not supported.
            QueueFullError: too many texts are waiting.
            DeadlineError: a time limit has passed.
        """
        call = self._embedding(texts, pooling, normalize, prompt, prompt_name, truncate, truncate_dim)
        rows = call.run(timeout_s, queue_timeout_s)
        return np.asarray(rows[0]) if isinstance(texts, str) else np.stack(rows)

    async def aembed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool | int | None = None,
        truncate_dim: int | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray:
        """Works as `embed` without blocking the event loop; cancelling ends it between forwards."""
        call = self._embedding(texts, pooling, normalize, prompt, prompt_name, truncate, truncate_dim)
        rows = await call.run_async(timeout_s, queue_timeout_s)
        return np.asarray(rows[0]) if isinstance(texts, str) else np.stack(rows)

    def warm_up_texts(self, progress: Progress | None = None) -> str | None:
        """Compiles the programs of `embed`, labels and scores for all lengths of texts.

        Args:
            progress: Shows the number of programs.

        Returns:
            Why texts will still compile programs; None if they will not.

        Raises:
            TorchaxServeError: the model was closed meanwhile, or a program cannot be compiled.
        """
        from torchax_serve.pooling.classification import HEADS
        from torchax_serve.pooling.warm_up import warm_up

        def closed() -> str | None:
            return "a closed model" if self._is_closed else None

        shown = progress or SilentProgress()
        if self.class_name.endswith(tuple(HEADS.values())):
            return warm_up(self._head(), (), shown, closed)
        embedders = [self._embedder(chooses=True)]
        with contextlib.suppress(InvalidArgumentError):  # without files of sentence-transformers requests say it
            own = self._embedder(chooses=False)
            embedders = [own] if own.field != embedders[0].field else [own, *embedders]
        return warm_up(embedders[-1], tuple(embedders), shown, closed)

    def _embedding(
        self,
        texts: str | Sequence[Text],
        pooling: str | None,
        normalize: bool | None,
        prompt: str | None,
        prompt_name: str | None,
        truncate: bool | int | None,
        truncate_dim: int | None,
    ) -> QueuedTexts:
        """Returns the call for `texts`, which are checked."""
        from torchax_serve.pooling.batching import checked_texts
        from torchax_serve.pooling.embedding import embed as embed_texts

        self._followed()
        options: dict[str, Any] = {
            "pooling": pooling,
            "normalize": normalize,
            "prompt": prompt,
            "prompt_name": prompt_name,
            "truncate": truncate,
            "truncate_dim": truncate_dim,
        }

        def call(items: Sequence[Any]) -> Any:  # on the queue's thread, since an embedder reads files
            return embed_texts(self._embedder(chooses=pooling is not None), items, **options)

        return QueuedTexts(
            self._pooling_queue, ("embed", type(truncate), *options.values()), call, checked_texts(texts)
        )


class LabelsTexts(EmbedsTexts):
    """A model with labels of texts, if its class has a head for them."""

    def classify(
        self,
        texts: str | Sequence[Text],
        *,
        truncate: bool | int = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Classification | list[Classification]:
        """Returns labels of texts with scores.

        The scores are those of transformers' ``text-classification`` pipeline.

        Args:
            texts: one text or several; a list of token ids may replace a text.
            truncate: cut texts that are too long instead of raising; a number: cut them to so many tokens.
            timeout_s: as in `embed`.
            queue_timeout_s: as in `embed`.

        Raises:
            UnsupportedModelError: the model has no head that classifies texts.
            InvalidArgumentError: no text, an empty one, or one that is too long.
            QueueFullError: too many texts are waiting.
            DeadlineError: a time limit has passed.
        """
        found = self._call("classify", texts, truncate).run(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    async def aclassify(
        self,
        texts: str | Sequence[Text],
        *,
        truncate: bool | int = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Classification | list[Classification]:
        """Works as `classify`, without blocking the event loop."""
        call = self._call("classify", texts, truncate)
        found = await call.run_async(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    def classify_tokens(
        self,
        texts: str | Sequence[Text],
        *,
        truncate: bool | int = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[TokenLabel] | list[list[TokenLabel]]:
        """Returns a label per token, special tokens left out; arguments and errors as in `classify`."""
        call = self._call("classify_tokens", texts, truncate)
        found = call.run(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    async def aclassify_tokens(
        self,
        texts: str | Sequence[Text],
        *,
        truncate: bool | int = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[TokenLabel] | list[list[TokenLabel]]:
        """Works as `classify_tokens`, without blocking the event loop."""
        call = self._call("classify_tokens", texts, truncate)
        found = await call.run_async(timeout_s, queue_timeout_s)
        return found[0] if isinstance(texts, str) else found

    def _call(self, name: str, texts: str | Sequence[Text], truncate: bool | int | None) -> QueuedTexts:
        from torchax_serve.pooling import classification
        from torchax_serve.pooling.batching import checked_texts

        function, checked = getattr(classification, name), checked_texts(texts)
        self._followed()

        def call(items: Sequence[Any]) -> Any:
            return function(self._head(), items, truncate=truncate)

        return QueuedTexts(self._pooling_queue, (name, type(truncate), truncate), call, list(checked))
