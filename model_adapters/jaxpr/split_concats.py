"""Replacement of slices of concatenations by the parts themselves.

It comes before XLA's partitioner sees either. A fused product such as q|k|v is computed by shares: each device has its
heads' part of all three. Model code then cuts the result where q ends, which is no border between devices, and XLA
would move data to make the full result first. XLA's simplifier knows the identity ``slice(concat(a, b)) = a``, but on
CPU and TPU it runs after the partitioner. The traced program is evaluated with concatenations kept in parts for as
long as what is done to them can be done to each. In the same way tokens and heads that model code merges into rows, to
normalize each head, stay two dimensions: the merged one could not be divided by heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.sharding import Mesh

from model_adapters.jaxpr.interpreter import CALLS, SHARED, bind, in_context_of
from model_adapters.jaxpr.lazy_arrays import ConcatParts, MergedRows
from model_adapters.ops.spmd import on_mesh

KEPT_CALLS = (SHARED, "_layer")
"""Beginnings of the names of functions that are called from many places, and not evaluated here."""
_LAZY = (ConcatParts, MergedRows)


def split_concats(function: Callable[..., Any], mesh: Mesh | None = None) -> Callable[..., Any]:
    """Returns the same function without concatenations that parts can replace.

    It is traced for `mesh`, and a function of pytrees of arrays.
    """

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        with on_mesh(mesh):
            out = _evaluate(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), [_computed(each) for each in out])

    return call


def _computed(value: Any) -> Any:
    return value.computed() if isinstance(value, _LAZY) else value


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the results of a program, some of them perhaps not computed yet, as `args` may be."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    def read_computed(atom: Any) -> Any:
        value = read(atom)
        if isinstance(value, _LAZY):
            value = values[atom] = value.computed()
        return value

    values.update(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        with in_context_of(equation):
            results = _lazy_results(equation, [read(atom) for atom in equation.invars])
            if results is None:
                results = bind(equation.primitive, equation.params, [read_computed(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _lazy_results(equation: Any, operands: list[Any]) -> list[Any] | None:
    """Returns the results of an equation that makes or reads a lazy array; else None."""
    name, params = equation.primitive.name, equation.params
    lazy = next((each for each in operands if isinstance(each, _LAZY)), None)
    if name == "concatenate":
        return None if lazy is not None else [ConcatParts(tuple(operands), params["dimension"])]
    if lazy is None:
        is_merge = name == "reshape" and params["dimensions"] is None and isinstance(operands[0], jax.Array)
        merged = MergedRows.of(operands[0], params["new_sizes"]) if is_merge else None
        return None if merged is None else [merged]
    called = params.get(CALLS.get(name, ""))
    if called is not None and not str(params.get("name", "")).startswith(KEPT_CALLS):
        return _evaluate(called, operands)
    results: list[Any] | None = lazy.apply(equation, operands)
    return results
