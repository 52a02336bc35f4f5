"""Arrays that a traced program makes only to take apart again.

They are concatenations, and rows of merged dimensions. Each knows what an equation is on what it stands for; where it
does not, it is computed. See `split_concats`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from model_adapters.jaxpr.interpreter import bind
from model_adapters.ops.spmd import mesh_in_use

_ELEMENTWISE = (
    "abs add add_any and convert_element_type copy cos div eq erf exp exp2 expm1 ge gt integer_pow is_finite le log "
    "log1p logistic lt max min mul ne neg not or pow rsqrt select_n sign sin sqrt square stop_gradient sub tanh"
)
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min"))


@dataclass(frozen=True)
class ConcatParts:
    """A concatenation along dimension `axis` that is not computed yet."""

    arrays: tuple[jax.Array, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenation."""
        first = self.arrays[0].shape
        return (*first[: self.axis], self._ends[-1], *first[self.axis + 1 :])

    @property
    def _ends(self) -> list[int]:
        """Index after the last element of each part."""
        return list(itertools.accumulate(part.shape[self.axis] for part in self.arrays))

    def computed(self) -> jax.Array:
        """Returns the concatenation as one array."""
        return jax.lax.concatenate(self.arrays, self.axis)

    def slice(self, start: int, stop: int) -> ConcatParts | jax.Array | None:
        """Elements `start` to `stop` of `axis`; None where they do not end with parts."""
        ends = self._ends
        for part, end in zip(self.arrays, ends, strict=True):
            begin = end - part.shape[self.axis]
            if begin <= start and stop <= end:
                return jax.lax.slice_in_dim(part, start - begin, stop - begin, axis=self.axis)
        if (start == 0 or start in ends) and stop in ends:
            first, last = (0 if start == 0 else ends.index(start) + 1), ends.index(stop) + 1
            return ConcatParts(self.arrays[first:last], self.axis)
        return None

    def apply(self, equation: Any, operands: Sequence[Any]) -> list[Any] | None:
        """Returns the results of an equation on parts; None if it cannot be computed on parts."""
        name, params = equation.primitive.name, equation.params
        if name in ELEMENTWISE:
            return self._elementwise(equation, operands)
        if len(operands) > 1:
            return None
        result: Any = None
        if name == "slice":
            result = None if params["strides"] else self._sliced(params["start_indices"], params["limit_indices"])
        elif name == "split":
            ends = [0, *itertools.accumulate(params["sizes"])]
            parts = [self.slice(*each) for each in itertools.pairwise(ends)] if params["axis"] == self.axis else [None]
            return None if any(part is None for part in parts) else parts
        elif name in ("reshape", "squeeze"):
            result = self._reshaped(equation.outvars[0].aval.shape)
        elif name == "broadcast_in_dim":
            result = self._broadcast(params["shape"], params["broadcast_dimensions"])
        elif name == "transpose":
            order = params["permutation"]
            result = ConcatParts(tuple(part.transpose(order) for part in self.arrays), order.index(self.axis))
        return None if result is None else [result]

    def _elementwise(self, equation: Any, operands: Sequence[Any]) -> list[Any] | None:
        by_operand = [self._cut_alike(operand) for operand in operands]
        known = [parts for parts in by_operand if parts is not None]
        if len(known) < len(operands):
            return None
        parts = (bind(equation.primitive, equation.params, each)[0] for each in zip(*known, strict=True))
        return [ConcatParts(tuple(parts), self.axis)]

    def _cut_alike(self, operand: Any) -> Sequence[Any] | None:
        """Returns the parts of an operand beside these parts; None if it has others."""
        ends, shape = [0, *self._ends], getattr(operand, "shape", ())
        if isinstance(operand, ConcatParts):
            return operand.arrays if operand.axis == self.axis and [0, *operand._ends] == ends else None
        if shape == () or (len(shape) == len(self.shape) and shape[self.axis] == 1):
            return [operand] * len(self.arrays)
        if isinstance(operand, MergedRows) or len(shape) != len(self.shape) or shape[self.axis] != ends[-1]:
            return None
        parts = [jax.lax.slice_in_dim(operand, *pair, axis=self.axis) for pair in itertools.pairwise(ends)]
        mesh = mesh_in_use()
        if mesh is None or math.prod(shape) > shape[self.axis]:
            return parts
        # A vector of the model's, which every device has: XLA would divide it in one piece, not by part.
        everywhere = NamedSharding(mesh, PartitionSpec())
        return [jax.lax.with_sharding_constraint(part, everywhere) for part in parts]

    def _sliced(self, starts: tuple[int, ...], limits: tuple[int, ...]) -> ConcatParts | jax.Array | None:
        """Returns a slice along all dimensions."""
        axis, result = self.axis, self.slice(starts[self.axis], limits[self.axis])

        def cut(part: jax.Array) -> jax.Array:
            ends = (*limits[:axis], part.shape[axis], *limits[axis + 1 :])
            return jax.lax.slice(part, (*starts[:axis], 0, *starts[axis + 1 :]), ends)

        return (
            ConcatParts(tuple(map(cut, result.arrays)), axis)
            if isinstance(result, ConcatParts)
            else (None if result is None else cut(result))
        )

    def _reshaped(self, after: tuple[int, ...]) -> ConcatParts | None:
        """Returns the same in another shape in which the concatenated dimension is one of its own."""
        before, axis = self.shape, self.axis
        for place, size in enumerate(after):
            if size == before[axis] > 1 and math.prod(before[:axis]) == math.prod(after[:place]):
                shapes = ((*after[:place], part.shape[axis], *after[place + 1 :]) for part in self.arrays)
                parts = (part.reshape(shape) for part, shape in zip(self.arrays, shapes, strict=True))
                return ConcatParts(tuple(parts), place)
        return None

    def _broadcast(self, after: tuple[int, ...], dimensions: tuple[int, ...]) -> ConcatParts | None:
        place = dimensions[self.axis]
        if after[place] != self.shape[self.axis]:
            return None
        shapes = ((*after[:place], part.shape[self.axis], *after[place + 1 :]) for part in self.arrays)
        parts = (
            jax.lax.broadcast_in_dim(part, shape, dimensions) for part, shape in zip(self.arrays, shapes, strict=True)
        )
        return ConcatParts(tuple(parts), place)


@dataclass(frozen=True)
class MergedRows:
    """An array whose first `num_lead` dimensions are to be one, which is not computed yet.

    One of them may be divided among devices, and the merged one could not be.
    """

    array: jax.Array
    num_lead: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with merged dimensions."""
        return (math.prod(self._lead), *self.array.shape[self.num_lead :])

    @property
    def _lead(self) -> tuple[int, ...]:
        return self.array.shape[: self.num_lead]

    @classmethod
    def of(cls, array: jax.Array, shape: tuple[int, ...]) -> MergedRows | None:
        """Returns ``array.reshape(shape)`` if that merges leading dimensions; else None."""
        before = array.shape
        if len(shape) == 2 and before and 1 < shape[1] < before[-1] and before[-1] % shape[1] == 0:
            array = array.reshape(*before[:-1], before[-1] // shape[1], shape[1])  # heads side by side, as rows
        num_lead = array.ndim - len(shape) + 1
        merges = len(shape) > 1 and num_lead > 1 and array.shape[num_lead:] == shape[1:]
        return cls(array, num_lead) if merges and sum(n > 1 for n in array.shape[:num_lead]) > 1 else None

    def computed(self) -> jax.Array:
        """Returns the array with merged dimensions."""
        return self.array.reshape(self.shape)

    def apply(self, equation: Any, operands: Sequence[Any]) -> list[Any] | None:
        """Returns the results of an equation without merging; None if it cannot be computed so."""
        name, params, more = equation.primitive.name, equation.params, self.num_lead - 1
        if name in ELEMENTWISE:
            unmerged = [self._like(operand) for operand in operands]
            if any(operand is None for operand in unmerged):
                return None
            return [MergedRows(bind(equation.primitive, params, unmerged)[0], self.num_lead)]
        if len(operands) > 1:
            return None
        if name in REDUCTIONS and 0 not in params["axes"]:
            params = {**params, "axes": tuple(axis + more for axis in params["axes"])}
            return [MergedRows(bind(equation.primitive, params, [self.array])[0], self.num_lead)]
        after = equation.outvars[0].aval.shape
        if name == "broadcast_in_dim":
            dimensions = params["broadcast_dimensions"]
            if dimensions[0] == 0 and after[0] == self.shape[0]:
                places = (*range(self.num_lead), *(place + more for place in dimensions[1:]))
                array = jax.lax.broadcast_in_dim(self.array, (*self._lead, *after[1:]), places)
                return [MergedRows(array, self.num_lead)]
        elif name in ("reshape", "squeeze"):
            if after and after[0] == self.shape[0]:
                return [MergedRows(self.array.reshape(*self._lead, *after[1:]), self.num_lead)]
            return [self.array.reshape(after)]
        return None

    def _like(self, operand: Any) -> Any:
        """Returns an operand with these leading dimensions, or ones; None if it has others."""
        if isinstance(operand, MergedRows):
            return operand.array if operand._lead == self._lead else None
        shape: tuple[int, ...] = getattr(operand, "shape", ())
        if not shape:
            return operand
        if isinstance(operand, ConcatParts) or len(shape) != len(self.shape) or shape[0] not in (1, self.shape[0]):
            return None
        lead = (1,) * self.num_lead if shape[0] == 1 else self._lead
        return operand.reshape(*lead, *shape[1:])
