"""Parity tasks.

Each has a mapping of transformers, and the function that checks one of its model types.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from torchax_serve.parity.result import PACKED, PER_SEQUENCE, STATIC, TRANSFORMERS_LOOP, Result


@dataclasses.dataclass(frozen=True)
class ParityTask:
    """Parity check of all model types in one mapping of transformers.

    Attributes:
        mapping: Name of the mapping in ``transformers.models.auto.modeling_auto``; several are joined by "|". With a
            colon, "module:function": the function returns the names to check instead of model types. Empty if the
            caller names files.
        checker: "module:function"; the function takes a model type and returns a `Result`.
        title: Title of the section in docs/models.md.
        introduction: Text of the section: what is compared, and what passing means; a format string with "{passed}" and
            "{total}".
        executors: Executors that the results name, in the order of docs/models.md; empty for models that do not
            generate.
    """

    mapping: str
    checker: str
    title: str
    introduction: str
    executors: tuple[str, ...] = ()

    @property
    def is_of_types(self) -> bool:
        """Whether the names to check are model types."""
        return bool(self.mapping) and ":" not in self.mapping

    def types(self) -> list[str]:
        """Returns every name to check.

        These are the model types of the mapping in the installed transformers, or other names.
        """
        from transformers.models.auto import modeling_auto

        if not self.is_of_types:
            return list(_imported(self.mapping)()) if self.mapping else []
        return sorted({each for name in self.mapping.split("|") for each in getattr(modeling_auto, name)})

    def check(self, model_type: str) -> Result:
        """Checks one model type and returns its result."""
        checker: Callable[[str], Result] = _imported(self.checker)
        return checker(model_type)


def _imported(name: str) -> Any:
    """Imports the function named by "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


CAUSAL = "causal"
CHECKPOINTS = "checkpoints"
"""Task of published configurations, read from a folder outside of this project."""
HEADS = "heads"
"""Task of the models with a head for each further task of transformers."""
STARTS = "starts"
"""Task of a second process that serves what a first has left on disk."""
TASKS: dict[str, ParityTask] = {
    CAUSAL: ParityTask(
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "torchax_serve.parity.check_causal:check",
        "Models",
        "",
        (PACKED, PER_SEQUENCE, STATIC),
    ),
    "seq2seq": ParityTask(
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "torchax_serve.parity.check_seq2seq:check",
        "Sequence to sequence",
        "Every type that transformers maps to a sequence-to-sequence model. **{passed} of {total} pass**: logits "
        "within 1e-4 of eager PyTorch's, and 16 greedy tokens of `generate` the same, for one input and for a batch "
        "of two lengths. Where the engine takes the type, so are the tokens of both inputs in one batch; a prompt of a "
        "decoder is cut into chunks there.",
        (PACKED, PER_SEQUENCE, STATIC, TRANSFORMERS_LOOP),
    ),
    "speech": ParityTask(
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "torchax_serve.parity.check_speech:check",
        "Speech to text",
        "Every type that transformers maps to speech recognition. **{passed} of {total} pass**: logits within 1e-4 of "
        "eager PyTorch's, and the same 16 greedy tokens of `generate`, for each of two audio inputs and for both in a "
        "batch. Where the engine takes the type, so are the tokens of both inputs in one batch; a prompt of a decoder "
        "is cut into chunks there. VibeVoice is compared without the noise that its encoder draws by default.",
        (PACKED, PER_SEQUENCE, STATIC, TRANSFORMERS_LOOP),
    ),
    "encoder": ParityTask(
        "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES|MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        "torchax_serve.parity.check_encoder:check_encoder",
        "Encoders",
        "Every type that transformers maps to a text encoder or to a masked language model. **{passed} of {total} "
        "pass**: hidden states of a text are within 1e-4 of eager PyTorch's, and the embeddings of three texts in one "
        "batch within 1e-4 of eager PyTorch's for each text by itself.",
    ),
    "classifier": ParityTask(
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "torchax_serve.parity.check_encoder:check_classifier",
        "Classifiers",
        "Every type that transformers maps to a sequence classifier. **{passed} of {total} pass**: logits of a text "
        "are within 1e-4 of eager PyTorch's, and those of three texts in one batch within 1e-4 of eager PyTorch's for "
        "each text by itself.",
    ),
    "images": ParityTask(
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "torchax_serve.parity.check_images:check",
        "Images and text",
        "Types that transformers maps to a model of images and text. **{passed} of {total} checked pass**: with an "
        "image in the prompt, logits under `jax.jit` are within 1e-4 of eager PyTorch's, and 16 greedy tokens of "
        "`generate` the same; another image must give other logits. Where the engine takes the type, so are the tokens "
        "of two prompts with an image each in one batch, one of which is cut into chunks where they see no later ones. "
        "[images.md](images.md) says how it is done.",
        (PACKED, PER_SEQUENCE, STATIC, TRANSFORMERS_LOOP),
    ),
    HEADS: ParityTask(
        "torchax_serve.parity.check_head:names",
        "torchax_serve.parity.check_head:check",
        "Heads for other tasks",
        "Types that transformers maps to a model for another task than those above, once for each task. "
        "**{passed} of {total} checked pass**: all tensors of the output of `forward` are within 1e-4 of eager "
        "PyTorch's, relative to the largest value of a tensor where that is more than 1; integers (classes, labels, "
        "indices) and flags are the same. Integers have 32 bits. A type whose class a section above has is left out, "
        "and so is the base model of a type with a head. Pipelines are not compared.",
    ),
    "configurations": ParityTask(
        "torchax_serve.parity.tiny.configurations:cases",
        "torchax_serve.parity.check_configuration:check",
        "Configurations",
        "What checkpoints of one type vary, one difference at a time. **{passed} of {total} pass**: as for the types "
        "above, logits within 1e-4 of eager PyTorch's, and 16 greedy tokens the same in a padded batch, unbatched, and "
        "on the engine among other requests.",
        (PACKED, PER_SEQUENCE, STATIC),
    ),
    STARTS: ParityTask(
        "torchax_serve.parity.check_start:names",
        "torchax_serve.parity.check_start:check",
        "Second starts",
        "Types that the engine takes (of which those of sequences to sequences and of speech have the task in front), "
        "each served from a folder by one process, and then by a new one from what the first has left on disk. "
        "**{passed} of {total} checked pass**: 16 greedy tokens of two inputs are those of eager PyTorch in the first "
        "process, the second process has the same, and it traces no program of the model. *starts from*: a start "
        "record, with no code of the model, or the model's folder. *programs*: those that were read from disk, by "
        "XLA's and LLVM's quickest settings.",
        (PACKED, PER_SEQUENCE),
    ),
    CHECKPOINTS: ParityTask("", "torchax_serve.parity.check_configuration:check_file", "Checkpoints by name", ""),
}
"""Parity tasks by name, in the order of docs/models.md."""
