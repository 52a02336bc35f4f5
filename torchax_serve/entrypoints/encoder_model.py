"""`EncoderModel`: embeds, classifies and ranks texts, and marks answers in them.

`serve` returns it for a model that does not generate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.entrypoints.text_methods import LabelsTexts
from torchax_serve.generation.jax_forward import following
from torchax_serve.pooling.batching import checked_texts
from torchax_serve.pooling.module_texts import ModuleTexts, limit_of
from torchax_serve.pooling.queue import QueuedTexts
from torchax_serve.tasks.answers import forward_of_module, marked_answers
from torchax_serve.tasks.results import MarkedAnswer
from torchax_serve.validation.argument_hints import refuses_unknown


class EncoderModel(LabelsTexts, ServedModel):
    """Text model that returns embeddings (`embed`), labels or scores; made by `serve`.

    It does not generate.
    """

    writes_text = False

    @refuses_unknown
    def answer(
        self,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        max_answer_len: int = 15,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[MarkedAnswer]:
        """Returns the parts of a text that answer a question, the best first.

        Args:
            question: a text.
            context: the text with the answer; a long one is read in windows that overlap.
            top_k: most answers.
            max_answer_len: most tokens of an answer.
            timeout_s: as in `embed`.
            queue_timeout_s: as in `embed`.

        Raises:
            UnsupportedModelError: the model has no head that marks answers.
            InvalidArgumentError: an empty question or text, or a question that leaves no room for the text.
            QueueFullError: too many texts are waiting.
            DeadlineError: a time limit has passed.
        """
        call = self._marking(question, context, top_k, max_answer_len)
        return list(call.run(timeout_s, queue_timeout_s)[0])

    @refuses_unknown
    async def aanswer(
        self,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        max_answer_len: int = 15,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[MarkedAnswer]:
        """Works as `answer`, without blocking the event loop."""
        call = self._marking(question, context, top_k, max_answer_len)
        return list((await call.run_async(timeout_s, queue_timeout_s))[0])

    def _marking(self, question: str, context: str, top_k: int, max_answer_len: int) -> QueuedTexts:
        loaded = self._followed()
        if not self.class_name.endswith("ForQuestionAnswering"):
            raise UnsupportedModelError(
                f"answer: expected a model that marks answers (…ForQuestionAnswering), got {self.name}, a "
                f"{self.class_name}"
            )
        for name, value in (("top_k", top_k), ("max_answer_len", max_answer_len)):
            if type(value) is not int or value < 1:
                raise InvalidArgumentError(f"{name}: expected a whole number >= 1, got {value!r}; correct it")
        for name, text in (("question", question), ("context", context)):
            if not isinstance(text, str):
                raise InvalidArgumentError(f"{name}: expected a text, got {text!r:.80}")
            checked_texts(text)
        options: dict[str, Any] = {
            "top_k": top_k,
            "max_answer_len": max_answer_len,
            "max_len": limit_of(loaded, self.runtime),
            "can_pad": ModuleTexts(self.runtime).can_pad,
        }

        def call(items: Sequence[Any]) -> list[list[MarkedAnswer]]:
            forward = forward_of_module(self._module)
            with following(self.runtime):
                return [marked_answers(forward, self.tokenizer, *pair, **options) for pair in items]

        return QueuedTexts(self._pooling_queue, ("answer", top_k, max_answer_len), call, [(question, context)])
