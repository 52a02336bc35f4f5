"""Checks by model code of its inputs' values, deferred to the end of the program.

In a trace there are no values, so the program returns the results of the checks.

Models for images check that a prompt has a placeholder token for every feature of its images. transformers writes such
checks as ``torch._check_tensor_all``, and counts by ``embeddings[mask].numel()``, whose shape a trace cannot know.
"""

from __future__ import annotations

import linecache
import sys
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import TorchTensor, default_env, jax_view, set_lowering, torch_view
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings import constant_folding
from model_adapters.lowerings.traced_conditions import TracedConditions

_CONDITIONS = TracedConditions()
collect = _CONDITIONS.collect
"""Yields the conditions bool[] of unknown value that model code makes inside.

The conditions are assumed to be met.
"""
collect_if_collected, add = _CONDITIONS.collect_if_collected, _CONDITIONS.add


def install() -> None:
    """Registers the lowering in torchax's table."""
    set_lowering(torch.ops.aten._is_all_true, _is_all_true)
    TorchTensor.item = _item(TorchTensor.item)


def _is_all_true(x: jax.Array) -> jax.Array:
    """Computes ``torch._is_all_true``, which exists only for checks."""
    conditions = _CONDITIONS.found
    if not isinstance(x, jax.core.Tracer) or conditions is None:
        return jnp.all(x)
    conditions.append(jnp.all(x))
    with jax.ensure_compile_time_eval():
        return jnp.ones((), bool)


class TracedAssertValue:
    """A number of unknown value in an ``assert`` of model code.

    Its comparison with another number becomes a condition.
    """

    def __init__(self, value: jax.Array) -> None:
        self._value = value

    def _compared(self, function: Any, other: Any) -> bool:
        assert _CONDITIONS.found is not None  # this value is made only while conditions are collected
        _CONDITIONS.found.append(function(self._value, other))
        return True

    def __lt__(self, other: Any) -> bool:
        return self._compared(jnp.less, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(jnp.less_equal, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(jnp.greater, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(jnp.greater_equal, other)


def _item(theirs: Any) -> Any:
    """Returns a replacement of ``tensor.item()``, for numbers of unknown value in an ``assert``."""

    def item(self: torch.Tensor) -> Any:
        if constant_folding.is_traced(self) and _CONDITIONS.found is not None:
            caller = sys._getframe(1)
            if linecache.getline(caller.f_code.co_filename, caller.f_lineno).lstrip().startswith("assert "):
                return TracedAssertValue(jax_view(self))
        return theirs(self)

    return item


class TracedMaskSelection(TorchTensor):
    """``tensor[mask]`` with a mask of unknown values.

    Its elements can be counted. It can also be computed with, on the condition that the mask selects all elements.
    Models that leave out images of nothing but padding select so; a program of fixed shapes is made for images that all
    count, and returns whether they did.
    """

    @staticmethod
    def __new__(cls: Any, source: torch.Tensor, mask: torch.Tensor) -> Any:
        """Makes the selection of `source` [*dims, *rest] by `mask` bool[*dims]."""
        return TorchTensor.__new__(cls, jax_view(source), default_env())

    def __init__(self, source: torch.Tensor, mask: torch.Tensor) -> None:
        self._env = default_env()
        self._source, self._chosen = jax_view(source), jax_view(mask)
        self._is_assumed = False

    @property
    def _elem(self) -> Any:
        conditions = _CONDITIONS.found
        if conditions is None or not constant_folding.is_enabled():
            raise UnsupportedModelError("the model's code computes with a selection whose size is known after the step")
        if not self._is_assumed:
            conditions.append(jnp.all(self._chosen))
            self._is_assumed = True
        return self._source.reshape(-1, *self._source.shape[self._chosen.ndim :])

    def size(self, dim: int | None = None) -> Any:
        """Returns the size of the tensor from which the mask selects."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Any:
        """Returns the number of selected elements, int32[], a traced number."""
        return torch_view(jnp.sum(self._chosen) * (self._source.size // max(self._chosen.size, 1)))
