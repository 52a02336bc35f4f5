"""Submodules that a class's ``generate`` calls outside the forward, compiled as well."""

from __future__ import annotations

import types
from typing import Any

from model_adapters import quirks
from model_adapters.errors import UnsupportedArgumentError
from model_adapters.quirks.quirk import Run


def compile_submodules(model: Any, run: Run) -> None:
    """Replaces submodule methods that the ``generate`` of `model` calls.

    The quirk of the model's architecture does that.

    Args:
        model: A transformers model.
        run: As `torchax_serve.runtime.model_runtime.ModelRuntime.call_method`.
    """
    if (replace := quirks.of(model).submodules) is not None:
        replace(model, run)


def has_parts_on_jax(model: Any) -> bool:
    """Returns whether `compile_submodules` has replaced methods of submodules of `model`."""
    return quirks.of(model).submodules is not None


def reject_generators(kwargs: dict[str, Any]) -> None:
    """Raises UnsupportedArgumentError for audio that arrives in pieces, from a generator."""
    for name, value in kwargs.items():
        if isinstance(value, types.GeneratorType):
            raise UnsupportedArgumentError(
                f"{name}: expected a tensor with all of the input, got a generator; audio that is still being "
                "recorded is not supported here: collect it first"
            )
