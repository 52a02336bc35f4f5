"""What is checked of which model types: a mapping of transformers, and the function that checks one type of it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

from torchax_serve.parity.result import Result


@dataclasses.dataclass(frozen=True)
class Task:
    """One walk over a mapping of transformers.

    Attributes:
        mapping: its name in ``transformers.models.auto.modeling_auto``.
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

    def types(self) -> list[str]:
        """Every model type of the mapping, in the installed transformers."""
        from transformers.models.auto import modeling_auto

        return sorted(getattr(modeling_auto, self.mapping))

    def check(self, model_type: str) -> Result:
        """Checks one type."""
        module, _, function = self.checker.partition(":")
        checker: Callable[[str], Result] = getattr(importlib.import_module(module), function)
        return checker(model_type)


CAUSAL = "causal"
TASKS: dict[str, Task] = {
    CAUSAL: Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "torchax_serve.parity.check:check", "Models", ""),
    "images": Task(
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
}
"""By name; the order is that of the document."""
