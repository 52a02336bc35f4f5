"""Arguments of a forward whose values model code reads while it is traced.

Examples are grids of images, sizes and small masks.

Such an argument is no input of the compiled program but a part of what the program is made for: other values mean
another program, as another shape does. Inside the trace it is PyTorch's own tensor, so `tolist`, boolean indexing and
loops over it work as written.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import torch

STATIC_DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
MAX_STATIC_ELEMENTS = 1 << 16
"""The most elements of a tensor that may be a constant: a grid, a mask of patches; no image."""


@dataclasses.dataclass(frozen=True, repr=False)
class StaticTensor:
    """A tensor as a constant, compared and hashed by values, shape and dtype."""

    content: bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StaticTensor:
        """Returns the value of a CPU tensor of integers or booleans."""
        return cls(tensor.contiguous().numpy().tobytes(), tuple(tensor.shape), tensor.dtype)

    def tensor(self) -> torch.Tensor:
        """Returns a new tensor with this value, on the CPU."""
        if not self.content:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.content), dtype=self.dtype).reshape(self.shape)

    def __repr__(self) -> str:
        digest = hashlib.sha256(self.content).hexdigest()[:32]
        return f"StaticTensor({self.dtype}{list(self.shape)}, {digest})"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLeaf:
    """A number or a name among the arrays of a tree, such as the layer that a feature is for."""

    value: Any


def without_constants(tree: Any) -> Any:
    """Returns `tree` with the values of constants in their place."""
    is_constant = lambda leaf: isinstance(leaf, StaticLeaf)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.value if is_constant(leaf) else leaf, tree, is_leaf=is_constant)


def can_be_static(tensor: torch.Tensor) -> bool:
    """Tells whether `tensor` may be static: a few integers or booleans, as model code reads."""
    return tensor.dtype in STATIC_DTYPES and tensor.numel() <= MAX_STATIC_ELEMENTS


def as_tensors(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `given` with a tensor in place of each host value."""
    return {name: value.tensor() if isinstance(value, StaticTensor) else value for name, value in given.items()}
