"""Rows that a program takes at its end are taken before what treats every row by itself.

A packed step computes hidden states of all its tokens, and the model then takes one of each sequence, whose logits are
wanted. After the last layer's attention all code works on tokens one by one, so the others are never read:
most of a layer, for prompts of any length. XLA does not move a gather before a product. Here the traced program is
read from its end, as liveness analysis does it (Aho et al., Compilers, 9.2.5), with "these rows" between "live" and
"dead", and evaluated so. The rows that a primitive needs of its operands are in `row_dependence.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from model_adapters.jaxpr.interpreter import Equation, Program, bind, inlined
from model_adapters.jaxpr.row_dependence import operand_axes, params_of_rows

GATHER_MODES = (jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS, jax.lax.GatherScatterMode.CLIP)
"""Of gathers that may move: nothing is filled in, so what is computed of a row is a row of what is computed."""


@dataclass(frozen=True)
class RowSelection:
    """A part of an array: along `axis`, the rows that `gather` takes."""

    axis: int
    gather: Equation

    @property
    def indices(self) -> Any:
        """Row indices int32[count, 1]."""
        return self.gather.inputs[1]

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.indices.aval.shape[0])

    def along(self, axis: int | None) -> RowSelection | None:
        """Returns the same rows along another axis; None: all of an array."""
        return None if axis is None else RowSelection(axis, self.gather)

    def take(self, array: jax.Array, indices: jax.Array) -> jax.Array:
        """Returns these rows of `array`."""
        others = tuple(axis for axis in range(array.ndim) if axis != self.axis)
        numbers = jax.lax.GatherDimensionNumbers(others, (self.axis,), (self.axis,))
        sizes = tuple(1 if axis == self.axis else size for axis, size in enumerate(array.shape))
        return jax.lax.gather(array, indices, numbers, sizes, mode=self.gather.params["mode"])


@dataclass(frozen=True)
class EquationPlan:
    """Plan of an equation: the `rows` of its results, from parts of its operands; None: all.

    `rows` are those to compute.
    """

    rows: RowSelection | None
    parts: tuple[RowSelection | None, ...]


def prune_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, traced without rows that no result reads.

    It is a function of pytrees of arrays; it is not differentiable.
    """

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        program = inlined(closed)
        while isinstance(tasks := _tasks(program), Equation):
            program.inline(tasks)
        out = _evaluate(program, tasks, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return call


def _tasks(program: Program) -> dict[Equation, EquationPlan] | Equation:
    """Returns, for each equation whose results are read, the plan of what is read.

    A gather that moves is asked for its own rows. If some rows are read of what a shared function returns, the call of
    that function is returned instead: to be inlined first.
    """
    readers: dict[Any, set[RowSelection | None]] = defaultdict(set)
    tasks: dict[Equation, EquationPlan] = {}
    moving = _moving_gathers(program)

    def read(atoms: Iterable[Any], parts: Iterable[RowSelection | None]) -> None:
        for atom, part in zip(atoms, parts, strict=True):
            if not isinstance(atom, jex.Literal):
                readers[atom].add(part)

    read(program.outputs, [None] * len(program.outputs))
    for equation in reversed(program.equations):
        if equation.is_shared_call and any(len(readers[x]) == 1 and None not in readers[x] for x in equation.outputs):
            return equation
        wanted = set[RowSelection | None]().union(*(readers[value] for value in equation.outputs))
        if not wanted and not equation.has_effects:
            continue
        rows = wanted.pop() if len(wanted) == 1 else None
        axes = None if rows is None else operand_axes(equation, rows.axis)
        if equation in moving:
            tasks[equation] = EquationPlan(moving[equation], (moving[equation], None))
        elif rows is not None and axes is not None:
            tasks[equation] = EquationPlan(rows, tuple(rows.along(axis) for axis in axes))
        else:
            tasks[equation] = EquationPlan(None, (None,) * len(equation.inputs))
        read(equation.inputs, tasks[equation].parts)
    return tasks


def _evaluate(program: Program, tasks: dict[Equation, EquationPlan], args: list[Any]) -> list[Any]:
    arrays = dict(zip(program.inputs, args, strict=True)) | program.constants
    taken: dict[tuple[Any, RowSelection], jax.Array] = {}

    def read(atom: Any, rows: RowSelection | None = None) -> Any:
        if isinstance(atom, jex.Literal):
            return atom.val
        if rows is None:
            return arrays[atom]
        if (atom, rows) not in taken:
            taken[atom, rows] = rows.take(arrays[atom], arrays[rows.indices])
        return taken[atom, rows]

    # Indices are known before any rows are taken.
    before = program.ancestors(task.rows.indices for task in tasks.values() if task.rows is not None)
    for equation in sorted((e for e in program.equations if e in tasks), key=lambda e: e not in before):
        rows, parts = tasks[equation].rows, tasks[equation].parts
        moves = rows is not None and rows.gather is equation
        with equation.context:
            if moves:
                results = [read(equation.inputs[0], rows)]
            else:
                operands = [read(atom, part) for atom, part in zip(equation.inputs, parts, strict=True)]
                params = equation.params if rows is None else params_of_rows(equation, rows.axis, rows.count)
                results = bind(equation.primitive, params, operands)
        if rows is None or moves:
            arrays.update(zip(equation.outputs, results, strict=True))
        else:
            taken.update(((value, rows), result) for value, result in zip(equation.outputs, results, strict=True))
    return [read(atom) for atom in program.outputs]


def _moving_gathers(program: Program) -> dict[Equation, RowSelection]:
    """Returns the gathers that take rows, with those rows.

    None has indices that come from another one's rows.
    """
    axes = {equation: _gathered_axis(equation) for equation in program.equations}
    rows = {equation: RowSelection(axis, equation) for equation, axis in axes.items() if axis is not None}
    depends = [gather for gather in rows if rows.keys() & program.ancestors(gather.inputs[1:])]
    return {gather: each for gather, each in rows.items() if gather not in depends}


def _gathered_axis(equation: Equation) -> int | None:
    """Returns the axis along which a gather takes some of the rows; None for other equations."""
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
    return axis if takes_rows and indices.shape[0] <= array.shape[axis] else None
