"""Decision models of transformers: typed questions by their files, scores by their head.

The files are those of `transformers.decision`, which writes the prompts: ``decision.json`` and
``decision_template.jinja``. A model with a head (`JevForDecision`) scores options by its hidden state in front of each
mark of the prompt, any other model by the logits of their labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading.file_names import DECISION_HEADS, DECISIONS

if TYPE_CHECKING:  # it imports torch, without which a server starts a second time
    from model_adapters.loading import LoadedModel

HEAD = "ForDecision"
"""Ending of the class of models with a head."""


class AskedQuestion(NamedTuple):
    """A question in a prompt.

    Attributes:
        name: Name in the request.
        kind: ``choice``, ``noul`` or ``score``.
        token_ids: The prompt up to the place that is read.
        labels: Labels of the options by their names, in the checkpoint's order.
        temperature: Divides the scores of the options.
    """

    name: str
    kind: str
    token_ids: list[int]
    labels: dict[str, str]
    temperature: float


class DecisionFiles:
    """Writes the prompts of a checkpoint's questions.

    Args:
        loaded: The model.

    Raises:
        UnsupportedModelError: The files ask for what is not supported, or transformers is too old for them.
        CheckpointError: They are not readable.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        folder, name, module = loaded.files_folder, loaded.source.name, loaded.module
        self._module_config: Any = module.config
        found = [each for each in DECISION_HEADS if folder is not None and (folder / each).is_file()]
        if found and not type(module).__name__.endswith(HEAD):
            message = f"expected a head within the model's own weights, got {name} with {found[0]} next to them; write"
            raise UnsupportedModelError(
                f"{message} it with transformers: JevForDecision.from_pretrained(...).save_pretrained(...)"
            )
        try:
            from transformers.decision import DecisionConfig
        except ImportError as error:
            raise UnsupportedModelError(
                f"expected a transformers that has decision models for {name}; pip install --upgrade transformers"
            ) from error
        own = getattr(module, "decision_config", None) if loaded.source.kind == "object" else None
        try:
            where = "" if folder is None else str(folder)
            self._config = own or DecisionConfig.from_pretrained(where, local_files_only=True)
        except Exception as error:  # values are checked by a class that raises its own kinds
            line = str(error).strip().splitlines()[0]
            raise CheckpointError(f"{folder}/{DECISIONS[0]} is not readable ({line}): get the file again") from error
        if self._config.adapter:
            raise UnsupportedModelError(
                f"{name}: decision.json names an adapter ({self._config.adapter}), which would not be applied; merge "
                "it (peft's merge_and_unload) and save the model without it"
            )
        self._tokenizer = loaded.load_tokenizer()  # one of its own, as the marks become tokens of it
        self._is_causal = getattr(module.config.get_text_config(), "is_causal", True) is not False

    def head(self, weights: Mapping[str, Any]) -> DecisionHead:
        """Returns the head in the model's weights by name; raises as `DecisionHead.of`."""
        return DecisionHead.of(self._module_config, weights)

    def asked(self, state: Any, questions: Mapping[str, Any]) -> list[AskedQuestion]:
        """Returns the questions of a request in their prompts.

        Raises:
            InvalidArgumentError: One that the checkpoint does not take.
            UnsupportedModelError: The template puts several questions into a prompt of a model that is not causal.
        """
        try:
            prompts = self._config.prepare_inputs({"state": state, "questions": dict(questions)}, self._tokenizer)
        except ValueError as error:
            raise InvalidArgumentError(f"questions: {error}") from error
        found = []
        for inputs, group in prompts:
            ids, marks = inputs["input_ids"][0].tolist(), inputs["marks"].tolist()
            # Each question is read in front of its mark. What follows there is unseen by a causal model.
            if len(marks) != len(group) or (not self._is_causal and marks != [len(ids)]):
                message = "expected decision_template.jinja to have one mark for each question, for a model that is not"
                raise UnsupportedModelError(f"{message} causal one question whose mark is at the end")
            for question, mark in zip(group, marks, strict=True):
                labels = dict(zip(question.options, question.labels, strict=True))
                heat = float(self._config.temperature.get(question.type, 1.0))
                found.append(AskedQuestion(question.name, question.type, ids[:mark], labels, heat))
        return found


@dataclasses.dataclass(frozen=True)
class DecisionHead:
    """The linear head of `JevForDecision`.

    Attributes:
        weight: float32[num_scores, hidden].
        bias: float32[num_scores].
        offsets: First row of each kind of question.
        softcap: Largest score, by ``tanh``; None for any.
    """

    weight: np.ndarray
    bias: np.ndarray
    offsets: Mapping[str, int]
    softcap: float | None

    @classmethod
    def of(cls, config: Any, weights: Mapping[str, Any]) -> DecisionHead:
        """Returns the head of a model's weights.

        Raises:
            UnsupportedModelError: Its weights are quantized.
        """
        names = ("proj.weight", "proj.bias")
        if not all(hasattr(weights[name], "__array__") for name in names):
            raise UnsupportedModelError("expected a decision head that is not quantized; leave quantization= out")
        weight, bias = (np.asarray(weights[name], np.float32) for name in names)
        return cls(weight, bias, dict(config.offsets), config.softcap)

    def scores(self, hidden: np.ndarray, kind: str, num_options: int) -> np.ndarray:
        """Returns the scores of a question's options, float32[num_options].

        Args:
            hidden: The hidden state in front of its mark, float32[hidden].
            kind: Kind of the question.
            num_options: Its options.
        """
        rows = slice(self.offsets[kind], self.offsets[kind] + num_options)
        found = self.weight[rows] @ hidden + self.bias[rows]
        return found if self.softcap is None else self.softcap * np.tanh(found / self.softcap)

    def check(self, questions: Sequence[AskedQuestion]) -> None:
        """Raises InvalidArgumentError for a question with more options than the head has rows for."""
        for question in questions:
            most = len(self.bias) - self.offsets[question.kind]
            if len(question.labels) > most:
                got = f"got {len(question.labels)} of {question.name!r}"
                raise InvalidArgumentError(f"questions: expected at most {most} options of a {question.kind}, {got}")
