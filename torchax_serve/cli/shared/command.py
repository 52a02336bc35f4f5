"""Commands of the program.

Each is a module of `torchax_serve.cli` with a `Command`, found by its name.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import ModuleType
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


class Commands(MutableMapping[str, Any]):
    """Commands of click by name, each made when it is first looked up, to save imports.

    Args:
        package: Package with a module for each command, which has its name.
        make: Makes the command of click.
    """

    def __init__(self, package: ModuleType, make: Callable[[Command], Any]) -> None:
        self._package, self._make = package, make
        found = pkgutil.iter_modules(package.__path__)
        self._names = {module.name for module in found if not module.ispkg and module.name != "main"}
        self._made: dict[str, Any] = {}

    def all(self) -> tuple[Command, ...]:
        """Returns all commands, by position."""
        commands = (self._command(name) for name in self._names)
        return tuple(sorted(commands, key=lambda command: (command.position, command.name)))

    def _command(self, name: str) -> Command:
        command: Command = importlib.import_module(f"{self._package.__name__}.{name}").COMMAND
        assert command.name == name
        return command

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name not in self._names:
                raise KeyError(name)
            self._made[name] = self._make(self._command(name))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return (command.name for command in self.all())

    def __len__(self) -> int:
        return len(self._names)

    def __setitem__(self, name: str, made: Any) -> None:
        self._names.add(name)
        self._made[name] = made

    def __delitem__(self, name: str) -> None:
        self._names.remove(name)
        self._made.pop(name, None)


def first_screen_lines(program: str, commands: Sequence[Command]) -> list[str]:
    """Formats the examples of all commands, one a line."""
    examples = [example for command in commands for example in command.examples]
    return [f"  {program} {arguments:<23}  {text}" for arguments, text in examples]
