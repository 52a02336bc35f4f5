"""How each parity task is checked, and what docs/models.md says of it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from torchax_serve.parity.result import Result
from torchax_serve.parity.tasks import CAUSAL, CHECKPOINTS, CONFIGURATIONS, HEADS, STARTS, TASKS


@dataclasses.dataclass(frozen=True)
class TaskCheck:
    """The check of a parity task.

    Attributes:
        checker: "module:function"; the function takes a name to check and returns a `Result`.
        introduction: Text of its section: what is compared, and what passing means; a format string with "{passed}" and
            "{total}".
        names: "module:function"; the function returns the names to check. Empty if the task has a mapping of
            transformers, or the caller names files.
    """

    checker: str
    introduction: str = ""
    names: str = ""


CHECKS: dict[str, TaskCheck] = {
    CAUSAL: TaskCheck("parity_sweep.check_causal:check"),
    "seq2seq": TaskCheck(
        "parity_sweep.check_seq2seq:check",
        "Every type that transformers maps to a sequence-to-sequence model. **{passed} of {total} pass**: logits "
        "within 1e-4 of eager PyTorch's, and 16 greedy tokens of `generate` the same, for one input and for a batch "
        "of two lengths. Where the engine takes the type, so are the tokens of both inputs in one batch; a prompt of a "
        "decoder is cut into chunks there.",
    ),
    "speech": TaskCheck(
        "parity_sweep.check_speech:check",
        "Every type that transformers maps to speech recognition. **{passed} of {total} pass**: logits within 1e-4 of "
        "eager PyTorch's, and the same 16 greedy tokens of `generate`, for each of two audio inputs and for both in a "
        "batch. Where the engine takes the type, so are the tokens of both inputs in one batch; a prompt of a decoder "
        "is cut into chunks there. VibeVoice is compared without the noise that its encoder draws by default.",
    ),
    "encoder": TaskCheck(
        "parity_sweep.check_encoder:check_encoder",
        "Every type that transformers maps to a text encoder or to a masked language model. **{passed} of {total} "
        "pass**: hidden states of a text are within 1e-4 of eager PyTorch's, and the embeddings of three texts in one "
        "batch within 1e-4 of eager PyTorch's for each text by itself.",
    ),
    "classifier": TaskCheck(
        "parity_sweep.check_encoder:check_classifier",
        "Every type that transformers maps to a sequence classifier. **{passed} of {total} pass**: logits of a text "
        "are within 1e-4 of eager PyTorch's, and those of three texts in one batch within 1e-4 of eager PyTorch's for "
        "each text by itself.",
    ),
    "images": TaskCheck(
        "parity_sweep.check_images:check",
        "Types that transformers maps to a model of images and text. **{passed} of {total} checked pass**: with an "
        "image in the prompt, logits under `jax.jit` are within 1e-4 of eager PyTorch's, and 16 greedy tokens of "
        "`generate` the same; another image must give other logits. Where the engine takes the type, so are the tokens "
        "of two prompts with an image each in one batch, one of which is cut into chunks where they see no later ones. "
        "[images.md](images.md) says how it is done.",
    ),
    HEADS: TaskCheck(
        "parity_sweep.check_head:check",
        "Types that transformers maps to a model for another task than those above, once for each task. "
        "**{passed} of {total} checked pass**: all tensors of the output of `forward` are within 1e-4 of eager "
        "PyTorch's, relative to the largest value of a tensor where that is more than 1; integers (classes, labels, "
        "indices) and flags are the same. Integers have 32 bits. A type whose class a section above has is left out, "
        "and so is the base model of a type with a head. Pipelines are not compared.",
        names="parity_sweep.check_head:names",
    ),
    CONFIGURATIONS: TaskCheck(
        "parity_sweep.check_configuration:check",
        "What checkpoints of one type vary, one difference at a time. **{passed} of {total} pass**: as for the types "
        "above, logits within 1e-4 of eager PyTorch's, and 16 greedy tokens the same in a padded batch, unbatched, and "
        "on the engine among other requests.",
        names="parity_sweep.tiny.configurations:cases",
    ),
    STARTS: TaskCheck(
        "parity_sweep.check_start:check",
        "Types that the engine takes (of which those of sequences to sequences and of speech have the task in front), "
        "each served from a folder by one process, and then by a new one from what the first has left on disk. "
        "**{passed} of {total} checked pass**: 16 greedy tokens of two inputs are those of eager PyTorch in the first "
        "process, the second process has the same, and it traces no program of the model. *starts from*: a start "
        "record, with no code of the model, or the model's folder. *programs*: those that were read from disk, by "
        "XLA's and LLVM's quickest settings.",
        names="parity_sweep.check_start:names",
    ),
    CHECKPOINTS: TaskCheck("parity_sweep.check_configuration:check_file"),
}
"""Checks by the names of `TASKS`."""


def names_of(task: str) -> list[str]:
    """Returns every name that a task checks.

    These are the model types of its mapping in the installed transformers, or other names.
    """
    return list(_imported(CHECKS[task].names)()) if CHECKS[task].names else TASKS[task].types()


def check(task: str, name: str) -> Result:
    """Checks a model type, or what else a task has names for, and returns its result."""
    checker: Callable[[str], Result] = _imported(CHECKS[task].checker)
    return checker(name)


def _imported(name: str) -> Any:
    """Imports the function named by "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
