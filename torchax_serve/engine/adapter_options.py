"""Options of the adapters that requests can name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from model_adapters.errors import InvalidArgumentError
from torchax_serve.scheduler.config import check_int

MAX_LORAS, MAX_LORA_RANK = 256, 512
"""Largest values of the options: all matrices lie on the device."""
DEFAULT_LORA_RANK = 16
"""Maximum rank without adapters that say one, as in vLLM."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options of the adapters that requests can name; their names are vLLM's.

    Attributes:
        adapters: Folders of the first adapters by name.
        max_loras: Maximum number of adapters; None: as many as `adapters`, at least 1.
        max_lora_rank: Maximum rank; None: the largest of `adapters`, or 16 without any.
        lora_target_modules: Last parts of the names of the layers that may have adapters, such as "q_proj"; None:
            those of `adapters`, or all linear layers without any.
    """

    adapters: Mapping[str, str | os.PathLike[str]] = dataclasses.field(default_factory=dict)
    max_loras: int | None = None
    max_lora_rank: int | None = None
    lora_target_modules: Sequence[str] | None = None

    @classmethod
    def given(
        cls, adapters: object, max_loras: int | None, max_lora_rank: int | None, lora_target_modules: object
    ) -> AdapterOptions | None:
        """Returns the options that were given; None if all are None.

        Raises:
            InvalidArgumentError: a value of another type or out of its range.
        """
        if adapters is None and max_loras is None and max_lora_rank is None and lora_target_modules is None:
            return None
        if adapters is not None and not isinstance(adapters, Mapping):
            raise InvalidArgumentError(
                f"adapters: expected folders by name, {{'sql': 'path'}}, got {type(adapters).__name__}; a single one "
                "that is added to the weights is adapter="
            )
        options = cls(
            adapters=dict(adapters or {}),
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            lora_target_modules=lora_target_modules,  # type: ignore[arg-type]
        )
        options.check()
        return options

    def check(self) -> None:
        """Raises InvalidArgumentError for a value of another type or out of its range."""
        for name, most in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_LORA_RANK)):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, 1, "None chooses")
                if value > most:
                    raise InvalidArgumentError(f"{name}: expected at most {most}, got {value}; lower it")
        for name, path in self.adapters.items():
            if not isinstance(name, str) or not name or not isinstance(path, str | os.PathLike):
                raise InvalidArgumentError(f"adapters: expected folders by name, got {name!r}: {path!r}")
        if self.max_loras is not None and len(self.adapters) > self.max_loras:
            raise InvalidArgumentError(
                f"max_loras: expected at least {len(self.adapters)}, the number of adapters, got {self.max_loras}"
            )
        targets = self.lora_target_modules
        if targets is not None and (
            isinstance(targets, str)
            or not isinstance(targets, Sequence)
            or not targets
            or not all(isinstance(target, str) and target for target in targets)
        ):
            raise InvalidArgumentError(
                f"lora_target_modules: expected a list of names such as ['q_proj', 'v_proj'], got {targets!r}; None "
                "chooses"
            )
