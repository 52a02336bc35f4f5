"""Comparison of a checkpoint's tensors with those of its class.

It uses transformers' own report of a load.

transformers loads what fits, draws at random what is missing and logs both. Here nothing is drawn: what is missing is
an error, or belongs to a part that the model can be without. What the class has no place for is left unused, as there;
names that transformers' classes list as harmless (buffers of old releases, the other head) are not counted.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils.loading_report import LoadStateDictInfo

from model_adapters.errors import CheckpointError
from model_adapters.loading.load_report import some

logger = logging.getLogger("torchax_serve")


@dataclass(frozen=True)
class TensorMatch:
    """The correspondence of the tensors in the files and those of a class.

    Attributes:
        class_name: of the class that the configuration asks for.
        missing: names that the class has and the files do not, sorted.
        unused: names in the files that the class has no place for, sorted.
        faults: what makes the load an error whatever is left out, in words.
    """

    class_name: str
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    faults: tuple[str, ...]

    @classmethod
    def of(cls, module: PreTrainedModel, info: LoadStateDictInfo) -> TensorMatch:
        """Returns the match according to transformers' report `info` of loading `module`."""
        shapes = [f"{name} {list(got)}, expected {list(want)}" for name, got, want in info.mismatched_keys]
        found = {"not convertible": list(info.conversion_errors), "of another shape": shapes}
        faults = tuple(f"{len(names)} {what}: {some(names)}" for what, names in found.items() if names)
        missing = set() if info.conversion_errors else info.missing_keys  # what cannot be converted is missing as well
        return cls(type(module).__name__, tuple(sorted(missing)), tuple(sorted(info.unexpected_keys)), faults)

    def error(self, model_name: str) -> CheckpointError:
        """Returns the error that lists everything that does not correspond."""
        parts = [f"{len(self.missing)} missing: {some(self.missing)}"] if self.missing else []
        parts += self.faults
        if self.unused:
            parts.append(f"{len(self.unused)} without a place: {some(self.unused)}")
        remedy = (
            "config.json and the weight files are not of one model, or files are lacking; get both again"
            if self.missing or self.faults
            else "leave strict out to have them left unused"
        )
        return CheckpointError(
            f"the tensors of {model_name} do not fit {self.class_name}; {'; '.join(parts)}. {remedy}"
        )

    def strict_error(self, model_name: str) -> CheckpointError:
        """Returns the error in place of `note`."""
        if not self.missing:
            return self.error(model_name)
        return CheckpointError(
            f"the tensors of {model_name} do not fit {self.class_name}; {len(self.missing)} missing: "
            f"{some(self.missing)}. Leave strict out to load the part that is there"
        )

    def note(self, model_name: str, loaded_class: str) -> str | None:
        """Returns one line about tensors that were left out; None if everything corresponds."""
        parts = []
        if self.missing:
            what = f"{loaded_class} alone is loaded" if loaded_class != self.class_name else "they are left out"
            parts.append(f"{_count(self.missing)} of {self.class_name} missing ({some(self.missing, 2)}), {what}")
        if self.unused:
            parts.append(f"{_count(self.unused)} of the files unused by {loaded_class} ({some(self.unused, 2)})")
        return f"{model_name}: {'; '.join(parts)}" if parts else None

    def log_names(self) -> None:
        """Logs every name that was left out, a line each, for users who asked for details."""
        for what, names in {"missing": self.missing, "unused": self.unused}.items():
            for name in names:
                logger.info("%s: %s", what, name)


def without_missing_parts(module: PreTrainedModel, missing: tuple[str, ...]) -> PreTrainedModel | None:
    """Returns `module` or its base model, without the parts whose tensors are missing.

    Hidden states of tokens need neither a head nor a pooler after the last layer. None if more is missing.
    """
    base: Any = module.base_model
    prefix = f"{module.base_model_prefix}." if base is not module else ""
    under_head = [name.removeprefix(prefix) for name in missing if name.startswith(prefix)]
    if any(not name.startswith("pooler.") for name in under_head):
        return None
    if under_head:
        if "add_pooling_layer" not in inspect.signature(type(base).__init__).parameters:
            return None
        base.pooler = None
    return base if len(under_head) < len(missing) else module


def smaller_classes(model_class: type[PreTrainedModel], model_type: str) -> list[type[PreTrainedModel]]:
    """Returns classes of the same architecture with fewer tensors.

    They are the one without the head, and the one with the encoder only.
    """
    base = modeling_auto.MODEL_MAPPING_NAMES.get(model_type)
    names = [base if isinstance(base, str) else None]
    names += [f"{names[0].removesuffix('Model')}EncoderModel"] if names[0] else []
    found = [getattr(transformers, name, None) for name in names if name]
    return [each for each in found if isinstance(each, type) and each is not model_class]


def _count(names: tuple[str, ...]) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
