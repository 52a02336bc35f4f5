"""Commands of the leader to its followers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def everywhere(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that are replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def spread(value: np.ndarray, mesh: Mesh) -> jax.Array:
    """Replicates an array that each host has on every device, without communication."""
    return jax.make_array_from_callback(value.shape, everywhere(mesh), lambda index: value[index])


@dataclasses.dataclass(frozen=True)
class ArrayRef:
    """Reference by number to an array that every host has.

    The array is the result of an earlier program.
    """

    number: int


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Description of an array that is sent with each run of a program."""

    shape: tuple[int, ...]
    dtype: Any  # numpy's

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Returns the abstract array that programs take."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=everywhere(mesh))


@dataclasses.dataclass(frozen=True)
class Compile:
    """Command to compile a function of the model; answered by ``compiled``."""

    program: int  # its number from now on
    function: str
    spec: Any
    precision: str | None  # of products
    has_weights: bool
    args: Any  # the arguments' tree, its leaves `ArrayRef` or `ArraySpec`
    facts: dict[str, Any]  # facts about the model found by the leader's traces


@dataclasses.dataclass(frozen=True)
class Run:
    """Command to run a program.

    Its results are numbered from `first` on, in the order of their tree.
    """

    program: int
    leaves: tuple[Any, ...]  # of the arguments: `ArrayRef` or numpy arrays
    first: int
    dropped: tuple[int, ...]  # numbers of results that are not needed any more


@dataclasses.dataclass(frozen=True)
class End:
    """End of the run; `why` describes the error, if there was one."""

    why: str | None = None
