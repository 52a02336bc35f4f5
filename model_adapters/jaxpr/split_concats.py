"""Replacement of slices of concatenations by the parts themselves.

It comes before XLA's partitioner sees either. A fused product such as q|k|v is computed by shares: each device has its
heads' part of all three. Model code then cuts the result where q ends, which is no border between devices, and XLA
would move data to make the full result first. XLA's simplifier knows the identity ``slice(concat(a, b)) = a``, but on
CPU and TPU it runs after the partitioner. The traced program is evaluated with concatenations along the last dimension
kept in parts for as long as what is done to them can be done to each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from model_adapters.jaxpr.interpreter import bind, in_context_of


@dataclass(frozen=True)
class ConcatParts:
    """A concatenation along the last dimension that is not computed yet."""

    arrays: tuple[jax.Array, ...]

    @property
    def ends(self) -> list[int]:
        """Index after the last element of each part."""
        return list(itertools.accumulate(part.shape[-1] for part in self.arrays))

    def concatenated(self) -> jax.Array:
        """Returns the concatenation as one array."""
        return jax.lax.concatenate(self.arrays, self.arrays[0].ndim - 1)

    def slice(self, start: int, stop: int) -> ConcatParts | jax.Array | None:
        """Elements `start` to `stop` of the last dimension; None where they do not end with parts."""
        ends = self.ends
        for part, end in zip(self.arrays, ends, strict=True):
            begin = end - part.shape[-1]
            if begin <= start and stop <= end:
                return jax.lax.slice_in_dim(part, start - begin, stop - begin, axis=part.ndim - 1)
        if (start == 0 or start in ends) and stop in ends:
            first, last = (0 if start == 0 else ends.index(start) + 1), ends.index(stop) + 1
            return ConcatParts(self.arrays[first:last])
        return None


def split_concats(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, traced without concatenations that parts can replace.

    It is a function of pytrees of arrays.
    """

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        out = _evaluate(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return call


def _evaluate(closed: Any, args: list[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    def read_concatenated(atom: Any) -> Any:
        value = read(atom)
        if isinstance(value, ConcatParts):
            value = values[atom] = value.concatenated()
        return value

    values.update(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        with in_context_of(equation):
            short = _in_parts(equation, read)
            if short is not None:
                values[equation.outvars[0]] = short
                continue
            results = bind(equation.primitive, equation.params, [read_concatenated(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read_concatenated(atom) for atom in jaxpr.outvars]


def _in_parts(equation: Any, read: Callable[[Any], Any]) -> Any:
    """Returns the result of an equation on parts; None if it cannot be computed on parts."""
    name, params = equation.primitive.name, equation.params
    if name == "concatenate":
        arrays = [read(atom) for atom in equation.invars]
        if params["dimension"] == arrays[0].ndim - 1 if not isinstance(arrays[0], ConcatParts) else False:
            if any(isinstance(array, ConcatParts) for array in arrays):
                return None
            return ConcatParts(tuple(arrays))
        return None
    value = read(equation.invars[0]) if len(equation.invars) == 1 else None
    if not isinstance(value, ConcatParts):
        return None
    if name == "slice":
        shape = equation.invars[0].aval.shape
        starts, limits = params["start_indices"], params["limit_indices"]
        cuts_last_only = tuple(starts[:-1]) == (0,) * (len(shape) - 1) and tuple(limits[:-1]) == shape[:-1]
        if cuts_last_only and params["strides"] is None:
            return value.slice(starts[-1], limits[-1])
    elif name in ("reshape", "broadcast_in_dim"):
        before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        adds_ones = tuple(n for n in before if n != 1) == tuple(n for n in after if n != 1)
        if adds_ones and before and after and before[-1] == after[-1] > 1:
            return ConcatParts(tuple(part.reshape(*after[:-1], part.shape[-1]) for part in value.arrays))
    elif name == "convert_element_type":
        return ConcatParts(tuple(part.astype(params["new_dtype"]) for part in value.arrays))
    return None
