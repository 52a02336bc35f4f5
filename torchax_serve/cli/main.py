"""Entry point of ``torchax-serve``: its commands, ``--version``, and the first screen.

``torchax-serve`` is a console script. A command is a module of `torchax_serve.cli` with a `Command`; adding the file
registers it. Its function takes its arguments as Typer reads them, prints its result on stdout, raises errors of
`model_adapters.errors`, and returns its exit status (None is 0). `with_exit_status` adds ``--debug`` and the exit
statuses of this program.
"""

from __future__ import annotations

from torchax_serve.cli.shared import startup  # isort: skip  first: answers Ctrl-C while the rest is imported

import contextlib
import os
import sys
from typing import Annotated, Any

import typer

from torchax_serve import __version__, cli
from torchax_serve.cli.shared.command import Command, Commands, first_screen_lines
from torchax_serve.cli.shared.errors import EXIT_INTERRUPTED, EXIT_STATUS_HELP, with_exit_status
from torchax_serve.cli.shared.usage import CommandGroup

startup.imports_done()


def _made(command: Command) -> Any:
    """Returns the command of click."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    single.command(command.name, epilog=EXIT_STATUS_HELP)(with_exit_status(command.function))
    return typer.main.get_command(single)


COMMANDS = Commands(cli, _made)
"""Commands by name, in the order of ``--help``."""


class AllCommands(CommandGroup):
    """The group of `COMMANDS`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = COMMANDS


app = typer.Typer(
    name="torchax-serve",
    help="Any Hugging Face PyTorch model, its code untouched, served by JAX.",
    epilog=EXIT_STATUS_HELP,
    cls=AllCommands,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchax-serve {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def first_screen(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Any Hugging Face PyTorch model, its code untouched, served by JAX."""
    if context.invoked_subcommand is None:
        lines = [
            "torchax-serve runs Hugging Face PyTorch models, their code untouched, on JAX.",
            "",
            *first_screen_lines("torchax-serve", COMMANDS.all()),
            "",
            "Every command explains itself: torchax-serve run --help",
        ]
        typer.echo("\n".join(lines))


def main() -> None:
    """Runs the program with the arguments of the process; ends by ``SystemExit``."""
    startup.open_closed_streams()
    try:
        with contextlib.ExitStack() as at_the_end:
            # After the last line of output an interrupt needs no message.
            at_the_end.callback(startup.leave_at_once_on_interrupt)
            app(prog_name="torchax-serve")
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:
            # An orderly shutdown of torch and jax can take seconds: too long after Ctrl-C.
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)
        raise
