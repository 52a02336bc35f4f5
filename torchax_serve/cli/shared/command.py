"""Commands of the program.

Each is a module of `torchax_serve.cli` with a `Command`, found by its name.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the program; a module of `torchax_serve.cli` registers one as ``COMMAND``.

    Attributes:
        name: Name on the command line.
        function: Function of the command, as Typer reads it; returns the exit status (None is 0).
        position: Position in ``--help`` and on the first screen, from the smallest.
        examples: Lines of the first screen: arguments of the program, and what they do.
    """

    name: str
    function: Callable[..., Any]
    position: int
    examples: tuple[tuple[str, str], ...] = ()


def find_commands(package: str, folders: Sequence[str]) -> tuple[Command, ...]:
    """Imports every module of a package and returns their commands, by position.

    Args:
        package: Dotted name of the package.
        folders: Folders of the package (``__path__``).
    """
    names = [module.name for module in pkgutil.iter_modules(folders) if not module.ispkg and module.name != "main"]
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    commands = [module.COMMAND for module in modules if hasattr(module, "COMMAND")]
    return tuple(sorted(commands, key=lambda command: (command.position, command.name)))


def first_screen_lines(program: str, commands: Sequence[Command]) -> list[str]:
    """Formats the examples of all commands, one a line."""
    examples = [example for command in commands for example in command.examples]
    return [f"  {program} {arguments:<23}  {text}" for arguments, text in examples]
