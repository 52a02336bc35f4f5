"""Checks that indices are within a table: beyond its end is an error, as in PyTorch.

XLA would read the last row, or NaN, and leaves out writes beyond the end.

Token ids, positions, token types and the like are looked up by ``embedding``, or among the rows of a tensor of the
module. In a trace their values are unknown, so the program answers afterwards whether they were in range. Where values
are there, the error is raised on the spot, and names the table.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.errors import InvalidArgumentError
from model_adapters.lowerings.traced_conditions import TracedConditions
from model_adapters.program.embeddings import POSITIONS

_STATE = threading.local()
_CONDITIONS = TracedConditions()
collect = _CONDITIONS.collect
"""Yields the conditions bool[] on indices of unknown value that are looked up inside.

The conditions are to be checked after the program.
"""
collect_if_collected, add = _CONDITIONS.collect_if_collected, _CONDITIONS.add


@contextlib.contextmanager
def named(arrays: Mapping[str, jax.Array]) -> Iterator[None]:
    """Gives tables among `arrays` their names in errors, inside the context."""
    before, _STATE.arrays = getattr(_STATE, "arrays", None), arrays
    try:
        yield
    finally:
        _STATE.arrays = before


@contextlib.contextmanager
def also_named(pairs: Iterable[tuple[jax.Array, jax.Array]]) -> Iterator[None]:
    """Gives the first array of each pair the name of the second, inside the context."""
    names = {id(array): name for name, array in (getattr(_STATE, "arrays", None) or {}).items()}
    found = {names[id(outer)]: inner for inner, outer in pairs if id(outer) in names}
    with named({**(getattr(_STATE, "arrays", None) or {}), **found}):
        yield


def check_rows(tensor: Any, indices: Any, dim: int, *, from_end: bool = False) -> None:
    """Checks `indices` as `check` does, if `tensor` is a table of the module.

    It is one if it is one of the module's own tensors whose rows are taken, or if it has such a tensor for each
    sequence. Any other tensor is ignored.
    """
    arrays = getattr(_STATE, "arrays", None) or {}
    if not isinstance(indices, jax.Array) or not jnp.issubdtype(indices.dtype, jnp.integer):
        return
    is_table = dim == 0 and getattr(tensor, "ndim", 0) == 2 and any(array is tensor for array in arrays.values())
    if is_table:
        check(tensor, indices, from_end=from_end)
    elif dim == 1:
        named = (array for name, array in arrays.items() if name.rpartition(".")[2] in POSITIONS)
        if (table := next((array for array in named if array.shape == tensor.shape[1:]), None)) is not None:
            check(table, indices, from_end=from_end)


def check(table: jax.Array, indices: jax.Array, *, from_end: bool = False) -> None:
    """Checks that int `indices` [...] are rows of `table` [rows, ...].

    In a trace, where values are unknown, the check becomes a condition. With `from_end` negative ones count from the
    end.

    Raises:
        InvalidArgumentError: they are not; names the table.
    """
    conditions = _CONDITIONS.found
    if conditions is None or not indices.size:
        return
    num_rows = table.shape[0]
    first = -num_rows if from_end else 0
    if isinstance(indices, jax.core.Tracer):
        conditions.append(jnp.all((indices >= first) & (indices < num_rows)))
        return
    values = np.asarray(indices)
    least, most = int(values.min()), int(values.max())
    if least < first or most >= num_rows:
        arrays = getattr(_STATE, "arrays", None) or {}
        name = next((name for name, array in arrays.items() if array is table), "a table of the model")
        raise InvalidArgumentError(
            f"{name}: expected indices from 0 to {num_rows - 1}, the rows of this table, got {least} to {most}; give "
            "fewer tokens, or ids, positions and token types that the model has"
        )


def check_known(operator: str, length: int, indices: Any, *, from_end: bool = False) -> None:
    """Checks int `indices` [...] of known values along an axis of `length`.

    With `from_end` negative ones count from the end. Of unknown values nothing is checked.

    Raises:
        InvalidArgumentError: they are not; names the operator.
    """
    is_known = isinstance(indices, np.ndarray | jax.Array) and not isinstance(indices, jax.core.Tracer)
    if not is_known or not indices.size or not jnp.issubdtype(indices.dtype, jnp.integer):
        return
    if isinstance(indices, jax.Array) and not indices.is_fully_addressable:
        return
    values = np.asarray(indices)
    least, most = int(values.min()), int(values.max())
    first = -length if from_end else 0
    if least < first or most >= length:
        raise InvalidArgumentError(
            f"{operator}: expected indices from {first} to {length - 1}, got {least} to {most}; PyTorch has no others"
        )


def checked(operator: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operator of an array, an axis and indices along it, with `check_known` before."""

    def computed(x: jax.Array, dim: int, indices: Any, *args: Any, **kwargs: Any) -> Any:
        check_known(operator, x.shape[dim] if x.ndim else 1, indices)
        return theirs(x, dim, indices, *args, **kwargs)

    return computed
