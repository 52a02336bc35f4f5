"""The number of tokens in a cache as a traced tensor."""

from __future__ import annotations

from typing import Any

import jax
import torch

from model_adapters.bridge.views import TorchTensor, default_env


class TracedLength(TorchTensor):
    """The number of tokens that a cache holds, int32[], as model code gets it in a trace.

    What is known of it although it is traced: it is not zero, how many tokens it is at most, and how far apart it
    and sums of it with numbers are.
    """

    @staticmethod
    def __new__(cls: Any, elem: jax.Array, env: Any, most: int, base: Any = None, plus: int = 0) -> Any:
        """Returns a tensor over `elem`; `__init__` sets its attributes."""
        return TorchTensor.__new__(cls, elem, env)

    def __init__(self, elem: jax.Array, env: Any, most: int, base: Any = None, plus: int = 0) -> None:
        super().__init__(elem, env)
        self.upper_bound = most
        self.root = self if base is None else base
        self.offset = plus

    @classmethod
    def of(cls, length: jax.Array, most: int) -> TracedLength:
        """Returns the length `length` int32[], which has to be from 1 to `most`."""
        return cls(length, default_env(), most)

    def distance(self, other: Any) -> int | None:
        """Returns `other` less this length, if the difference is known."""
        return other.offset - self.offset if isinstance(other, TracedLength) and other.root is self.root else None

    def _is_zero(self, other: Any) -> bool:
        return type(other) is int and other == 0 and self.offset >= 0

    def __add__(self, other: Any) -> Any:
        if type(other) is int:
            return TracedLength(self._elem + other, self._env, self.upper_bound, self.root, self.offset + other)
        return super().__add__(other)

    __radd__ = __add__

    def __gt__(self, other: Any) -> Any:
        if type(other) is int and self.upper_bound + self.offset <= other:
            return False
        return True if self._is_zero(other) else super().__gt__(other)

    def __ne__(self, other: Any) -> Any:
        return True if self._is_zero(other) else super().__ne__(other)

    def __eq__(self, other: Any) -> Any:
        return False if self._is_zero(other) else super().__eq__(other)

    def __bool__(self) -> bool:
        return True if self.offset >= 0 else super().__bool__()

    __hash__ = torch.Tensor.__hash__
