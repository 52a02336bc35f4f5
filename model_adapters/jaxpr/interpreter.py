"""Traced programs as lists of equations.

They can be read from both ends and evaluated one by one. The interpreter is the one of JAX's documentation ("Writing
custom Jaxpr interpreters").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core as jex

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
"""Parameter with the called program, by primitives that call one."""


SHARED = "shared_"
"""Beginning of the names of functions that many equations call; such a call is an equation of its own."""


@dataclass(eq=False)
class Value:
    """A result of an equation, or an input; `aval` has its shape and dtype."""

    aval: Any


@dataclass(eq=False)
class Equation:
    """A primitive applied to values and literals."""

    primitive: Any
    params: dict[str, Any]
    inputs: list[Any]
    outputs: list[Value]
    has_effects: bool
    context: AbstractContextManager[None]  # to be evaluated in

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return str(self.primitive.name)

    @property
    def is_shared_call(self) -> bool:
        """Whether it calls a function that other equations call, too."""
        return _is_shared(self.primitive, self.params)


@dataclass
class Program:
    """Equations in an order in which they can be evaluated."""

    inputs: list[Value]
    outputs: list[Any]
    constants: dict[Value, Any] = field(default_factory=dict)
    equations: list[Equation] = field(default_factory=list)

    def inline(self, call: Equation) -> None:
        """Replaces `call`, a call of a shared function, by that function's equations."""
        place = self.equations.index(call)
        before, after = self.equations[:place], self.equations[place + 1 :]
        self.equations = before
        results = _inline(call.params[CALLS[call.name]], call.inputs, self)
        new = dict(zip(call.outputs, results, strict=True))

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex.Literal) else new.get(atom, atom)

        for equation in after:
            equation.inputs = [read(atom) for atom in equation.inputs]
        self.equations += after
        self.outputs = [read(atom) for atom in self.outputs]

    def ancestors(self, atoms: Iterable[Any]) -> set[Equation]:
        """Returns all equations that `atoms` are computed by."""
        sources = {value: equation for equation in self.equations for value in equation.outputs}
        open_atoms, found = list(atoms), set[Equation]()
        while open_atoms:
            atom = open_atoms.pop()
            equation = None if isinstance(atom, jex.Literal) else sources.get(atom)
            if equation is not None and equation not in found:
                found.add(equation)
                open_atoms += equation.inputs
        return found


def inlined(closed: jex.ClosedJaxpr) -> Program:
    """Returns `closed` with called programs inlined, but for shared functions.

    Rules for derivatives are lost.
    """
    values = {var: Value(var.aval) for var in closed.jaxpr.invars}
    program = Program([values[var] for var in closed.jaxpr.invars], [])
    program.outputs = _inline(closed, program.inputs, program)
    return program


@contextmanager
def in_context_of(equation: Any, scopes: str = "") -> Iterator[None]:
    """Evaluates a traced equation in its context, with the named scopes of its trace."""
    scopes = scopes or str(equation.source_info.name_stack)
    with jax.named_scope(scopes) if scopes else nullcontext(), equation.ctx.manager:
        yield


def _joined(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def _is_shared(primitive: Any, params: dict[str, Any]) -> bool:
    return primitive.name in CALLS and str(params.get("name", "")).startswith(SHARED)


def _inline(closed: jex.ClosedJaxpr, arguments: Sequence[Any], program: Program, outer_scopes: str = "") -> list[Any]:
    """Appends the equations of `closed` to `program`; returns what it gives for `arguments`.

    Args:
        closed: The called program.
        arguments: Its inputs.
        program: Where its equations go.
        outer_scopes: Named scopes around the call.
    """
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
    for var, constant in zip(jaxpr.constvars, closed.consts, strict=True):
        values[var] = Value(var.aval)
        program.constants[values[var]] = constant

    def read(atoms: Iterable[Any]) -> list[Any]:
        return [atom if isinstance(atom, jex.Literal) else values[atom] for atom in atoms]

    for each in jaxpr.eqns:
        inputs = read(each.invars)
        called = each.params.get(CALLS.get(each.primitive.name, ""))
        scopes = _joined(outer_scopes, str(each.source_info.name_stack))
        if called is not None and not _is_shared(each.primitive, each.params):
            outputs = _inline(called, inputs, program, scopes)
        else:
            outputs = [Value(var.aval) for var in each.outvars]
            context = in_context_of(each, scopes)
            program.equations.append(
                Equation(each.primitive, each.params, inputs, outputs, bool(each.effects), context)
            )
        values.update(zip(each.outvars, outputs, strict=True))
    return read(jaxpr.outvars)


def bind(primitive: Any, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Returns the results of `primitive` on `operands`."""
    given = primitive.get_bind_params(params)
    functions, params = given if isinstance(given, tuple) else ((), given)
    results = primitive.bind(*functions, *operands, **params)
    return list(results) if primitive.multiple_results else [results]
