"""What the leader has its followers do."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def everywhere(mesh: Mesh) -> NamedSharding:
    """For what every device has whole."""
    return NamedSharding(mesh, PartitionSpec())


def spread(value: np.ndarray, mesh: Mesh) -> jax.Array:
    """An array that each host has, whole on every device; no host asks another."""
    return jax.make_array_from_callback(value.shape, everywhere(mesh), lambda index: value[index])


@dataclasses.dataclass(frozen=True)
class ArrayRef:
    """An array that every host has: the result of an earlier program, by its number."""

    number: int


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """An array that comes with each run of a program."""

    shape: tuple[int, ...]
    dtype: Any  # numpy's

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Where programs have it."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=everywhere(mesh))


@dataclasses.dataclass(frozen=True)
class Compile:
    """Compile a function of the model; answered by ``compiled``."""

    program: int  # its number from now on
    function: str
    spec: Any
    precision: str | None  # of products
    has_weights: bool
    args: Any  # the arguments' tree, its leaves `ArrayRef` or `ArraySpec`
    facts: dict[str, Any]  # what the leader's traces have shown about the model


@dataclasses.dataclass(frozen=True)
class Run:
    """Run a program. Its results are numbered from `first` on, in the order of their tree."""

    program: int
    leaves: tuple[Any, ...]  # of the arguments: `ArrayRef` or numpy arrays
    first: int
    dropped: tuple[int, ...]  # numbers of results that nobody needs any more


@dataclasses.dataclass(frozen=True)
class End:
    """The run is over; `why` says what was wrong, if something was."""

    why: str | None = None
