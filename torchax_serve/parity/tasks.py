"""What is checked of which model types: a mapping of transformers, and the function that checks one type of it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from torchax_serve.parity.result import Result


@dataclasses.dataclass(frozen=True)
class ParityTask:
    """One walk over a mapping of transformers.

    Attributes:
        mapping: its name in ``transformers.models.auto.modeling_auto``; several, joined by "|". Where a colon is in it,
            "module:function" that gives the names of what is checked in the place of model types. Empty where the
            caller names files.
        checker: "module:function"; the function takes a model type and gives a `Result`.
        title: of its section in docs/models.md.
        introduction: what is compared, and what passing means; "{passed}" and "{total}" are filled in.
        roads: the ways of running a model that its results name, with what they are.
    """

    mapping: str
    checker: str
    title: str
    introduction: str
    roads: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_of_types(self) -> bool:
        """Whether what is checked are model types."""
        return bool(self.mapping) and ":" not in self.mapping

    def types(self) -> list[str]:
        """Every model type of the mapping, in the installed transformers; or every other name that is checked."""
        from transformers.models.auto import modeling_auto

        if not self.is_of_types:
            return list(_imported(self.mapping)()) if self.mapping else []
        return sorted({each for name in self.mapping.split("|") for each in getattr(modeling_auto, name)})

    def check(self, model_type: str) -> Result:
        """Checks one type."""
        checker: Callable[[str], Result] = _imported(self.checker)
        return checker(model_type)


def _imported(name: str) -> Any:
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


CAUSAL = "causal"
CHECKPOINTS = "checkpoints"
"""Published configurations, which lie in a folder outside of this project."""
TASKS: dict[str, ParityTask] = {
    CAUSAL: ParityTask("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "torchax_serve.parity.check_causal:check", "Models", ""),
    "seq2seq": ParityTask(
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "torchax_serve.parity.check_seq2seq:check",
        "Sequence to sequence",
        "Every type that transformers maps to a sequence-to-sequence model. **{passed} of {total} pass**: logits "
        "within 1e-4 of eager PyTorch's, and 16 greedy tokens of `generate` the same, for an input alone and for a "
        "batch of two lengths.",
        {"fast": "the fast loop of `generate`", "plain": "transformers' loop over the compiled forward"},
    ),
    "speech": ParityTask(
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "torchax_serve.parity.check_speech:check",
        "Speech to text",
        "Every type that transformers maps to speech recognition. **{passed} of {total} pass**: logits within 1e-4 of "
        "eager PyTorch's for two sounds, and the same 16 greedy tokens of `generate`, each sound alone and both in a "
        "batch.",
        {"fast": "the fast loop of `generate`", "plain": "transformers' loop over the compiled forward"},
    ),
    "encoder": ParityTask(
        "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES|MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        "torchax_serve.parity.check_encoder:check_encoder",
        "Encoders",
        "Every type that transformers maps to a text encoder or to a model of masked words. **{passed} of {total} "
        "pass**: hidden states of a text within 1e-4 of eager PyTorch's, and so the embeddings of three texts in one "
        "batch, each beside PyTorch's of that text alone.",
    ),
    "classifier": ParityTask(
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "torchax_serve.parity.check_encoder:check_classifier",
        "Classifiers",
        "Every type that transformers maps to a classifier of sequences. **{passed} of {total} pass**: logits of a "
        "text within 1e-4 of eager PyTorch's, and so those of three texts in one batch, each beside PyTorch's of that "
        "text alone.",
    ),
    "images": ParityTask(
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "torchax_serve.parity.check_images:check",
        "Images and text",
        "Types that transformers maps to a model of images and text. **{passed} of {total} checked pass**: with an "
        "image beside the prompt, logits under `jax.jit` are within 1e-4 of eager PyTorch's, and 16 greedy tokens of "
        "`generate` the same; another image must give other logits. [images.md](images.md) says how it is done.",
        {
            "fast": "the fast loop of `generate`, behind a compiled encoder or prefill",
            "plain": "transformers' loop over the compiled forward",
        },
    ),
    "configurations": ParityTask(
        "torchax_serve.parity.tiny.configurations:cases",
        "torchax_serve.parity.check_configuration:check",
        "Configurations",
        "What checkpoints of one type vary, one difference at a time. **{passed} of {total} pass**: as for the types "
        "above, logits within 1e-4 of eager PyTorch's, and 16 greedy tokens the same in a padded batch, alone, and on "
        "the engine among other requests.",
        {
            "paged": "engine, packed on the paged cache",
            "gathered": "engine, each request on what is gathered from its pages",
            "generate": "one request after the other",
            "fast": "the fast loop of `generate`, behind an encoder",
        },
    ),
    CHECKPOINTS: ParityTask("", "torchax_serve.parity.check_configuration:check_file", "Checkpoints by name", ""),
}
"""By name; the order is that of the document."""
