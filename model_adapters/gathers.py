"""Rows that a program takes at its end are taken before what treats every row by itself.

A packed step computes hidden states of all its tokens, and the model then takes one of each sequence, whose logits are
wanted. Behind the last layer's attention all code works on tokens one by one, so the others are computed for nobody:
most of a layer, for prompts of any length. XLA does not move a gather before a product. Here the traced program is
read from its end, as liveness analysis does it (Aho et al., Compilers, 9.2.5), with "these rows" between "live" and
"dead", and evaluated so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from model_adapters.jaxprs import Equation, Program, bind, inlined
from model_adapters.ops.cpu.kernels import ROW_BY_ROW

GATHER_MODES = (jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS, jax.lax.GatherScatterMode.CLIP)
"""Of gathers that may move: nothing is filled in, so what is computed of a row is a row of what is computed."""
_NAMES = """
abs add and ceil clamp convert_element_type copy cos div eq erf exp exp2 expm1 floor ge gt integer_pow is_finite le log
log1p logistic lt max min mul ne neg not or pow reduce_precision rem round rsqrt select_n sign sin sqrt square sub tan
tanh xor
"""
ELEMENT_BY_ELEMENT = frozenset(_NAMES.split())
"""Primitives whose operands have the shape of the result, or are scalars."""


@dataclass(frozen=True)
class Rows:
    """A part of an array: along `axis`, the rows that `gather` takes."""

    axis: int
    gather: Equation

    @property
    def indices(self) -> Any:
        """int32[count, 1]."""
        return self.gather.inputs[1]

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.indices.aval.shape[0])

    def along(self, axis: int) -> Rows:
        """The same rows along another axis."""
        return Rows(axis, self.gather)

    def cut(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape` of an array after they are taken."""
        return (*shape[: self.axis], self.count, *shape[self.axis + 1 :])

    def take(self, array: jax.Array, indices: jax.Array) -> jax.Array:
        """They, of `array`."""
        others = tuple(axis for axis in range(array.ndim) if axis != self.axis)
        numbers = jax.lax.GatherDimensionNumbers(others, (self.axis,), (self.axis,))
        sizes = tuple(1 if axis == self.axis else size for axis, size in enumerate(array.shape))
        return jax.lax.gather(array, indices, numbers, sizes, mode=self.gather.params["mode"])


def gathers_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of pytrees of arrays, whose trace computes no rows that nobody reads; not for derivatives."""

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        program = inlined(closed)
        out = _evaluate(program, _wanted(program), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return call


Plan = dict[Equation, Rows | None]
"""What of an equation's results is computed: rows of them, or all; of a gather that moves, the rows that it takes."""


def _wanted(program: Program) -> Plan:
    """The equations whose results are read, and what of them is."""
    readers: dict[Any, set[Rows | None]] = defaultdict(set)
    plan: Plan = {}
    gathers = {e: axis for e in program.equations if (axis := _gathered_axis(e)) is not None}
    for gather in [e for e in gathers if gathers.keys() & program.ancestors(e.inputs[1:])]:
        del gathers[gather]  # its indices are to be known before any rows are

    def read(atoms: Iterable[Any], parts: Iterable[Rows | None]) -> None:
        for atom, part in zip(atoms, parts, strict=True):
            if not isinstance(atom, jex.Literal):
                readers[atom].add(part)

    read(program.outputs, [None] * len(program.outputs))
    for equation in reversed(program.equations):
        parts = set[Rows | None]().union(*(readers[value] for value in equation.outputs))
        if not parts and not equation.has_effects:
            continue
        rows = parts.pop() if len(parts) == 1 else None
        if equation in gathers:
            plan[equation] = Rows(gathers[equation], equation)
            read(equation.inputs, (plan[equation], None))
        elif rows is not None and (axes := _operand_axes(equation, rows)) is not None:
            plan[equation] = rows
            read(equation.inputs, (None if axis is None else rows.along(axis) for axis in axes))
        else:
            plan[equation] = None
            read(equation.inputs, [None] * len(equation.inputs))
    return plan


def _evaluate(program: Program, plan: Plan, args: list[Any]) -> list[Any]:
    arrays = dict(zip(program.inputs, args, strict=True)) | program.constants
    taken: dict[tuple[Any, Rows], jax.Array] = {}

    def read(atom: Any, rows: Rows | None = None) -> Any:
        if isinstance(atom, jex.Literal):
            return atom.val
        if rows is None:
            return arrays[atom]
        if (atom, rows) not in taken:
            taken[atom, rows] = rows.take(arrays[atom], arrays[rows.indices])
        return taken[atom, rows]

    before = program.ancestors(rows.indices for rows in plan.values() if rows is not None)
    for equation in sorted((e for e in program.equations if e in plan), key=lambda e: e not in before):
        rows = plan[equation]
        with equation.context:
            if rows is None:
                results = bind(equation.primitive, equation.params, [read(atom) for atom in equation.inputs])
            elif rows.gather is equation:
                results = [read(equation.inputs[0], rows)]
            else:
                axes = _operand_axes(equation, rows) or ()
                parts = (None if axis is None else rows.along(axis) for axis in axes)
                operands = [read(atom, part) for atom, part in zip(equation.inputs, parts, strict=True)]
                results = bind(equation.primitive, _params_of(equation, rows), operands)
        if rows is None or rows.gather is equation:
            arrays.update(zip(equation.outputs, results, strict=True))
        else:
            taken.update(((value, rows), result) for value, result in zip(equation.outputs, results, strict=True))
    return [read(atom) for atom in program.outputs]


def _gathered_axis(equation: Equation) -> int | None:
    """The axis that a gather takes whole rows along, fewer than there are; None for other equations."""
    if equation.name != "gather" or equation.params["mode"] not in GATHER_MODES:
        return None
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    array, indices = (atom.aval for atom in equation.inputs)
    if len(numbers.start_index_map) != 1 or indices.ndim != 2 or isinstance(equation.inputs[1], jex.Literal):
        return None
    axis: int = numbers.start_index_map[0]
    others = tuple(each for each in range(array.ndim) if each != axis)
    drops_axis = numbers.collapsed_slice_dims == (axis,) and numbers.offset_dims == others
    takes_rows = drops_axis and all(sizes[each] == array.shape[each] for each in others)
    return axis if takes_rows and indices.shape[0] < array.shape[axis] else None


def _operand_axes(equation: Equation, rows: Rows) -> tuple[int | None, ...] | None:
    """By operand, the axis that its rows are wanted along, None for all of it. None: it is not known.

    With them, the same equation gives the rows of its results.
    """
    axis, shape = rows.axis, equation.outputs[0].aval.shape
    shapes = [atom.aval.shape for atom in equation.inputs]
    if equation.name in ELEMENT_BY_ELEMENT:
        return tuple(axis if each == shape else None for each in shapes)
    rule = _RULES.get(equation.name)
    return None if rule is None else rule(equation.params, axis, shape, shapes)


Shape = tuple[int, ...]
Axes = tuple[int | None, ...] | None


def _of_reduction(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    return ([each for each in range(len(operands[0])) if each not in params["axes"]][axis],)


def _of_squeeze(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    return ([each for each in range(len(operands[0])) if each not in params["dimensions"]][axis],)


def _of_transpose(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    return (params["permutation"][axis],)


def _of_reshape(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    before = math.prod(shape[:axis])
    for each, size in enumerate(operands[0]):
        if size == shape[axis] and math.prod(operands[0][:each]) == before:
            return (each,)
    return None


def _of_broadcast(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    dimensions = params["broadcast_dimensions"]
    there = dimensions.index(axis) if axis in dimensions else None
    return (there if there is not None and operands[0][there] == shape[axis] else None,)


def _of_concatenation(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    return None if params["dimension"] == axis else (axis,) * len(operands)


def _of_slice(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    return (axis,) if shape[axis] == operands[0][axis] else None


def _of_split(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    return None if params["axis"] == axis else (axis,)


def _of_product(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    contracted, batch = params["dimension_numbers"]
    if axis < len(batch[0]):
        return batch[0][axis], batch[1][axis]
    free = [
        [each for each in range(len(operands[side])) if each not in (*contracted[side], *batch[side])]
        for side in (0, 1)
    ]
    place = axis - len(batch[0])
    return (free[0][place], None) if place < len(free[0]) else (None, free[1][place - len(free[0])])


def _of_kernel(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes:
    if params["target_name"] not in ROW_BY_ROW or axis == len(operands[0]) - 1:
        return None
    return (axis, *(None for _ in operands[1:]))


_RULES: dict[str, Callable[[dict[str, Any], int, Shape, list[Shape]], Axes]] = {
    **{f"reduce_{kind}": _of_reduction for kind in ("and", "max", "min", "or", "prod", "sum")},
    "broadcast_in_dim": _of_broadcast,
    "concatenate": _of_concatenation,
    "dot_general": _of_product,
    "ffi_call": _of_kernel,
    "reshape": _of_reshape,
    "slice": _of_slice,
    "split": _of_split,
    "squeeze": _of_squeeze,
    "transpose": _of_transpose,
}


def _params_of(equation: Equation, rows: Rows) -> dict[str, Any]:
    """The parameters of the equation that gives `rows` of its results."""
    params = equation.params
    if equation.name == "ffi_call":
        avals = tuple(aval.update(shape=rows.cut(aval.shape)) for aval in params["result_avals"])
        return params | {"result_avals": avals}
    shape_name = {"reshape": "new_sizes", "broadcast_in_dim": "shape", "slice": "limit_indices"}.get(equation.name)
    return params if shape_name is None else params | {shape_name: rows.cut(params[shape_name])}
