"""What a configuration says about the quantization of its checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_adapters.errors import CheckpointError, UnsupportedModelError

_KEYS = ("quantization_config", "compression_config")

_DENSE = "use the unquantized checkpoint of this model"
_REMEDIES = {
    "aqlm": _DENSE,
    "vptq": _DENSE,
    "spqr": _DENSE,
    "higgs": _DENSE,
    "eetq": f"{_DENSE}, or an int8 one of compressed-tensors",
    "fp_quant": f"{_DENSE}, or one in nvfp4 or mxfp4",
    "quark": f"{_DENSE}, or one of compressed-tensors",
    "bitnet": "use the bfloat16 checkpoint of this model",
    "quanto": f"{_DENSE}, or one of torchao",
    "spinquant": _DENSE,
    "auto-round": "export it in the format gptq, awq or compressed-tensors",
    "intel/auto-round": "export it in the format gptq, awq or compressed-tensors",
    "modelopt": f"{_DENSE}, or one of compressed-tensors",
    "sinq": _DENSE,
    "metal": _DENSE,
    "fouroversix": f"{_DENSE}, or one of compressed-tensors in nvfp4",
}
"""Methods that are not read, and what to use in their place."""

READ = (
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "gptq",
    "hqq",
    "mxfp4",
    "mxfp8",
    "torchao",
)
"""Methods that are read."""


@dataclasses.dataclass(frozen=True)
class QuantizationSettings:
    """The quantization of a checkpoint.

    Attributes:
        method: One of `READ`.
        values: The keys of the configuration.
        file: Which file says so.
    """

    method: str
    values: Mapping[str, Any]
    file: Path

    def refuse(self, what: str, remedy: str = _DENSE) -> UnsupportedModelError:
        """Returns the error for settings that are not read: `what` names them."""
        return UnsupportedModelError(
            f"{self.file} has weights in {self.method} with {what}, which is not read: {remedy}"
        )

    def integer(self, key: str, choices: tuple[int, ...]) -> int:
        """Returns a number of the configuration that must be one of `choices`."""
        value = self.values.get(key)
        if value not in choices:
            raise self.refuse(f"{key} {value!r} (expected {', '.join(map(str, choices))})")
        return int(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Returns an object of the configuration; empty without one.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.file}: expected {key} of quantization_config to be an object, got {value!r}")
        return value

    @property
    def left_out(self) -> tuple[str, ...]:
        """Modules that the configuration leaves unquantized: names, or "re:" and a pattern."""
        named: list[str] = []
        for key in ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules", "skip_modules"):
            value = self.values.get(key) or []
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise CheckpointError(f"{self.file}: expected {key} to be a list of modules, got {value!r}")
            named += value
        for pattern in named:
            if pattern.startswith("re:"):
                compiled(pattern[3:], self.file)
        return tuple(named)


def settings_in(content: Mapping[str, Any], file: Path) -> QuantizationSettings | None:
    """Returns the quantization that a ``config.json`` states; None without any.

    A configuration inside of it may state it, too.

    Raises:
        UnsupportedModelError: a method that is not read.
        CheckpointError: no method, or two of them.
    """
    places = [
        content,
        *(value for key, value in content.items() if key.endswith("_config") and isinstance(value, dict)),
    ]
    found = [place[key] for place in places for key in _KEYS if place.get(key)]
    if not found:
        return None
    stated = found[0]
    if not isinstance(stated, dict):
        raise CheckpointError(f"{file}: expected quantization_config to be an object, got {stated!r}")
    if any(other != stated for other in found[1:]):
        raise CheckpointError(f"{file} states two quantizations that differ: leave quantization_config in one place")
    method = str(stated.get("quant_method", ""))
    if not method and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        method = "bitsandbytes"
    if method not in READ:
        remedy = _REMEDIES.get(method, _DENSE)
        raise UnsupportedModelError(
            f"{file} asks for quantized weights (quantization_config: {method or 'no quant_method'}), which are not "
            f"read (expected one of {', '.join(READ)}): {remedy}"
        )
    return QuantizationSettings(method, stated, file)


def compiled(pattern: str, file: Path) -> re.Pattern[str]:
    """Returns a regular expression of a configuration.

    Raises:
        CheckpointError: it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"{file}: expected a regular expression in quantization_config, got {pattern!r} ({error})"
        ) from error


def matches(pattern: str, module: str) -> bool:
    """Returns whether a module is meant by a name, the end or start of one, or "re:PATTERN"."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith(f".{pattern}") or module.startswith(f"{pattern}.")
