"""Formats usage errors: one line, with the command or the option that was probably meant.

The classes of errors are those of click, which is a package of its own or a part of typer, by typer's release; they
are therefore distinguished by their names.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from typer.core import TyperGroup

from torchax_serve.cli.shared.errors import EXIT_CLOSED_PIPE, EXIT_ERROR, EXIT_INTERRUPTED, drop_output, print_error
from torchax_serve.cli.shared.flag_names import HINTS

PROGRAM = "torchax-serve"
# Commands of other programs, and the same command here.
_COMMANDS = {
    "chat": "run",
    "complete": "run",
    "generate": "run",
    "benchmark": "bench",
    "collect-env": "doctor",
    "env": "doctor",
    "info": "doctor",
    "check": "doctor",
    "delete": "rm",
    "remove": "rm",
    "download": "pull",
    "ls": "models",
    "compare": "verify",
    "encode": "embed",
    "convert": "quantize",
    "create": "quantize",
    "lora": "train",
    "finetune": "train",
}
# Commands of other programs that need none here, and what to do.
_ADVICE = {
    "stop": "Ctrl-C or SIGTERM ends a server, and the end of run frees its model",
    "push": "a model is uploaded by the hub's own program, hf upload",
    "cp": "a folder of a model can be copied as it is",
    "login": "the hub's own program keeps a token, hf auth login; --token gives one",
}
# Commands of other programs that are flags here.
_FLAGS = {"help": "--help", "version": "--version", "completion": "--install-completion"}


class CommandGroup(TyperGroup):
    """Program with its commands; usage errors become one line on stderr and status 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the program as click does; ends by ``SystemExit`` with its status."""
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        return sys.exit(self._status(run)) if standalone_mode else run()

    def _status(self, run: Callable[[], Any]) -> int:
        try:
            status = run()
            sys.stdout.flush()
        except BrokenPipeError:
            drop_output(sys.stdout)
            return EXIT_CLOSED_PIPE
        except SystemExit as end:
            if not isinstance(end.__context__, BrokenPipeError):
                raise
            drop_output(sys.stdout)
            return EXIT_CLOSED_PIPE
        except Exception as error:
            if type(error).__name__ == "Abort":  # a question that was not answered
                return _interrupted()
            if not hasattr(error, "format_message"):
                raise
            print_error(usage_message(error, self))
            return EXIT_ERROR
        except KeyboardInterrupt:
            return _interrupted()
        # A command that was interrupted has said so and left by SystemExit; this is click's answer to Ctrl-C.
        return _interrupted() if status == EXIT_INTERRUPTED else int(status or 0)


def _interrupted() -> int:
    print("interrupted", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED


def usage_message(error: Any, group: Any) -> str:
    """Formats `error`, a usage error of click, in a program whose commands are those of `group`."""
    context = getattr(error, "ctx", None)
    command = context.command if context is not None else group
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return _no_such_option(error.option_name, command, group)
    if found := re.match(r"No such command '(.*?)'", str(error.message)):
        return _no_such_command(found[1], group)
    if kind == "MissingParameter" and error.param is not None:
        return f"{_shown(error.param)}: expected one, got none; {_see(command, group)}"
    if kind == "BadParameter" and error.param is not None:
        return f"{_shown(error.param)}: {_expected(error)}"
    message = str(error.format_message()).rstrip(".")
    found = re.match(r"Option '(.*?)' requires (?:an argument|\d+ arguments)", message)
    if found:
        return f"{found[1]}: expected a value behind it, got none"
    return f"{message[:1].lower()}{message[1:]}; {_see(command, group)}"


def _no_such_command(name: str, group: Any) -> str:
    commands = list(group.commands)
    if (meant := _COMMANDS.get(name)) in commands:
        return f"there is no command {name!r}; use {PROGRAM} {meant}"
    if name in _FLAGS:
        return f"there is no command {name!r}; use {PROGRAM} {_FLAGS[name]}"
    if name in _ADVICE:
        return f"there is no command {name!r}; {_ADVICE[name]}"
    near = difflib.get_close_matches(name, commands, n=2)
    if near:
        return f"there is no command {name!r}; did you mean {' or '.join(near)}?"
    if "/" in name or "." in name or any(character.isdigit() for character in name) or " " in name:
        return f"there is no command {name!r}; to ask a model, put run before it: {PROGRAM} run ..."
    return f"there is no command {name!r}; expected one of {', '.join(commands)}"


def _no_such_option(option: str, command: Any, group: Any) -> str:
    program = command.name if command is not group else PROGRAM
    if option.startswith("--") and (hint := HINTS.get(option)) is not None:
        return f"{program} has no option {option}: {hint}"
    arguments = [str(param.name) for param in command.params if param.param_type_name == "argument"]
    if option.startswith("--") and option[2:] in arguments:
        return f"{program} has no option {option}; write {' '.join([PROGRAM, program, *map(str.upper, arguments)])}"
    flags = list(_flags_of(command.params))
    near = difflib.get_close_matches(option, flags, n=2, cutoff=0.65)
    elsewhere = [name for name, other in group.commands.items() if option in _flags_of(other.params)]
    if elsewhere:
        said = f"{', '.join(elsewhere)} {'has' if len(elsewhere) == 1 else 'have'} it"
    elif near:
        said = f"did you mean {' or '.join(near)}?"
    else:
        said = _see(command, group)
    return f"{program} has no option {option}; {said}"


def _flags_of(params: Iterable[Any]) -> list[str]:
    return [flag for param in params for flag in [*param.opts, *param.secondary_opts] if flag.startswith("-")]


def _shown(param: Any) -> str:
    """Returns a parameter's name on the command line.

    It is its first long flag, or the name of the argument.
    """
    flags = [flag for flag in param.opts if flag.startswith("-")]
    return next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else str(param.name).upper())


def _expected(error: Any) -> str:
    """Formats the error of a bad value as expected and got.

    Releases of typer differ in their words.
    """
    message = str(error.message).rstrip(".")
    low = re.search(r"(?:greater than or equal to |>=\s*)(-?[\d.]+)", message)
    high = re.search(r"(?:less than or equal to |<=\s*)(-?[\d.]+)", message)
    bounds = " and ".join([*([f">= {low[1]}"] if low else []), *([f"<= {high[1]}"] if high else [])])
    got = _given(error, message)
    if (found := re.search(r"('.*?') is not one of ('.*')", message)) is not None:
        *others, last = re.findall(r"'(.*?)'", found[2])
        return f"expected {' or '.join(filter(None, [', '.join(others), last]))}, got {found[1]}"
    if re.search(r"\bvalid (?:int|integer)\b", message):
        kind = "a whole number"
    elif re.search(r"\bvalid (?:float|number)\b", message):
        kind = "a number"
    elif bounds:
        kind = "a number" if got is None or "." in got else "a whole number"
    else:
        return message[:1].lower() + message[1:]
    return f"expected {' '.join(filter(None, [kind, bounds]))}" + (f", got {got}" if got is not None else "")


def _given(error: Any, message: str) -> str | None:
    details = getattr(error.__cause__, "errors", None)
    if callable(details):  # of pydantic, which newer releases of typer check values by
        return repr(details()[0].get("input"))
    found = re.match(r"(?P<text>'.*?') is not a valid|(?P<number>\S+) is not in the range", message)
    return (found["text"] or found["number"]) if found else None


def _see(command: Any, group: Any) -> str:
    name = PROGRAM if command is group or command is None else f"{PROGRAM} {command.name}"
    return f"{name} --help explains"
