"""Rows of its operands that a primitive needs for some rows of its results.

`row_pruning` asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from model_adapters.jaxpr.interpreter import Equation
from model_adapters.ops.cpu.ffi import ROW_OPERANDS

_NAMES = """
abs add and ceil clamp convert_element_type copy cos div eq erf exp exp2 expm1 floor ge gt integer_pow is_finite le log
log1p logistic lt max min mul ne neg not or pow reduce_precision rem round rsqrt select_n sign sin sqrt square sub tan
tanh xor
"""
ELEMENT_BY_ELEMENT = frozenset(_NAMES.split())
"""Primitives whose operands have the sizes of the result, or 1 in place of one, or are scalars."""

Shape = tuple[int, ...]
Axes = tuple[int | None, ...]
Rule = Callable[[dict[str, Any], int, Shape, list[Shape]], Axes | None]
"""Parameters, the axis of the result, its shape and those of the operands, to what `operand_axes` returns."""


def operand_axes(equation: Equation, axis: int) -> Axes | None:
    """Returns, by operand, the axis of the rows that give the result's rows along `axis`.

    The axis is None for an operand that is needed in full. The result is None if the axes are not known, or if rows
    are not computed by themselves.
    """
    shape = equation.outputs[0].aval.shape
    shapes = [atom.aval.shape for atom in equation.inputs]
    if equation.name in ELEMENT_BY_ELEMENT:
        return tuple(axis if each and each[axis] == shape[axis] else None for each in shapes)
    rule = _RULES.get(equation.name)
    return None if rule is None else rule(equation.params, axis, shape, shapes)


def params_of_rows(equation: Equation, axis: int, count: int) -> dict[str, Any]:
    """Returns the parameters with which the equation gives `count` rows of its results.

    The rows are along `axis`.
    """
    params = equation.params

    def cut(shape: Shape) -> Shape:
        return (*shape[:axis], count, *shape[axis + 1 :])

    if equation.name == "ffi_call":
        return params | {"result_avals": tuple(aval.update(shape=cut(aval.shape)) for aval in params["result_avals"])}
    shape_name = {"reshape": "new_sizes", "broadcast_in_dim": "shape", "slice": "limit_indices"}.get(equation.name)
    return params if shape_name is None else params | {shape_name: cut(params[shape_name])}


def _of_reduction(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    return (_others(operands[0], params["axes"])[axis],)


def _of_squeeze(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    return (_others(operands[0], params["dimensions"])[axis],)


def _of_transpose(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    return (params["permutation"][axis],)


def _of_reshape(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    before = math.prod(shape[:axis])
    for each, size in enumerate(operands[0]):
        if size == shape[axis] and math.prod(operands[0][:each]) == before:
            return (each,)
    return None


def _of_broadcast(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    dimensions = params["broadcast_dimensions"]
    there = dimensions.index(axis) if axis in dimensions else None
    return (there if there is not None and operands[0][there] == shape[axis] else None,)


def _of_concatenation(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    return None if params["dimension"] == axis else (axis,) * len(operands)


def _of_slice(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    return (axis,) if shape[axis] == operands[0][axis] else None


def _of_split(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    return None if params["axis"] == axis else (axis,)


def _of_product(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    contracted, batch = params["dimension_numbers"]
    if axis < len(batch[0]):
        return batch[0][axis], batch[1][axis]
    left, right = (_others(operands[side], (*contracted[side], *batch[side])) for side in (0, 1))
    place = axis - len(batch[0])
    return (left[place], None) if place < len(left) else (None, right[place - len(left)])


def _of_kernel(params: dict[str, Any], axis: int, shape: Shape, operands: list[Shape]) -> Axes | None:
    count = ROW_OPERANDS.get(params["target_name"], 0)
    if not count or axis == len(operands[0]) - 1:
        return None
    return tuple(axis if number < count else None for number in range(len(operands)))


def _others(shape: Shape, axes: Any) -> list[int]:
    return [axis for axis in range(len(shape)) if axis not in axes]


_RULES: dict[str, Rule] = {
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
