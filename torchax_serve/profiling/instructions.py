"""Instructions of a compiled program: what they are and which scopes they were traced in."""

from __future__ import annotations

import dataclasses
import re

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PROGRAM = re.compile(r"HloModule ([\w.\-]+)")
CONTROL_FLOW = frozenset({"while", "conditional"})
"""Operations whose time is that of others, which a trace has as well."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
        kernel: What runs: the target of a custom call, else the instruction's name without its number.
        scopes: Scopes and primitive that it was traced from, such as ``jit(run)/model/layers/3/mlp/mul``.
        is_control_flow: Whether it only runs others, such as a loop.
    """

    kernel: str
    scopes: str
    is_control_flow: bool

    @property
    def primitive(self) -> str:
        """JAX primitive that it was traced from; that of the last operation of a fusion."""
        return self.scopes.rpartition("/")[2]


def instructions_of(text: str) -> tuple[str, dict[str, Instruction]]:
    """Returns the name of a program and its instructions by name.

    Args:
        text: Program in XLA's language (HLO), as ``compiled.as_text()`` has it.
    """
    program = _PROGRAM.search(text)
    found = {}
    for line in text.splitlines():
        name = _INSTRUCTION.match(line)
        if name is None:
            continue
        rest = line[name.end() :]
        opcode = _OPCODE.search(rest[_type_end(rest) :])
        scopes, target = _SCOPES.search(rest), _TARGET.search(rest)
        found[name[1]] = Instruction(
            kernel=target[1] if target else without_numbers(name[1]),
            scopes=scopes[1] if scopes else "",
            is_control_flow=opcode is not None and opcode[1] in CONTROL_FLOW,
        )
    return program[1] if program else "", found


def without_numbers(name: str) -> str:
    """Returns the name of an instruction without the numbers that tell it from others."""
    return re.sub(r"\.\d+", "", name)


def _type_end(text: str) -> int:
    """Returns the index behind the type at the start of `text`.

    The type is one array, or a tuple of them in parentheses.
    """
    if not text.startswith("("):
        return 0
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return index + 1
    return 0
