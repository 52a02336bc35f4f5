"""Entry point of the console script ``torchax-serve``: the list of commands, ``--version``, and the first screen.

A command is a function in a module of its own under `torchax_serve.cli`. It takes its arguments the way Typer reads
them, prints its result on stdout, raises errors of `model_adapters.errors`, and returns its exit status (``None`` is
0). `reported` gives each of them ``--debug`` and the exit statuses of this program.
"""

from __future__ import annotations

from torchax_serve.cli.shared import startup  # isort: skip  first: answers Ctrl-C while the rest is imported

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from torchax_serve import __version__
from torchax_serve.cli.bench import bench
from torchax_serve.cli.cache import cache
from torchax_serve.cli.deploy import deploy
from torchax_serve.cli.doctor import doctor
from torchax_serve.cli.embed import embed
from torchax_serve.cli.models import models
from torchax_serve.cli.ops import ops
from torchax_serve.cli.plan import plan
from torchax_serve.cli.pull import pull
from torchax_serve.cli.rm import rm
from torchax_serve.cli.run import run
from torchax_serve.cli.shared.errors import EXIT_INTERRUPTED, EXIT_STATUS_HELP, with_exit_status
from torchax_serve.cli.shared.usage import CommandGroup
from torchax_serve.cli.verify import verify

startup.imports_done()

# In the order of --help. One line registers a command.
COMMANDS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("run", run),
    ("embed", embed),
    ("verify", verify),
    ("bench", bench),
    ("plan", plan),
    ("deploy", deploy),
    ("models", models),
    ("pull", pull),
    ("rm", rm),
    ("doctor", doctor),
    ("ops", ops),
    ("cache", cache),
)

FIRST_SCREEN = """\
torchax-serve runs Hugging Face PyTorch models, their code untouched, on JAX.

  torchax-serve run                      chat with the small model that comes with the package
  torchax-serve run "What is JAX?"       ask it one question
  torchax-serve run qwen3-0.6b           chat with a model of the Hugging Face hub
  torchax-serve run ./my-model -p Hello  a folder of your own, one answer
  torchax-serve embed ./my-model Hello   the embedding of a text
  torchax-serve verify qwen3-0.6b        its numbers beside those of PyTorch
  torchax-serve bench --against hf       its speed beside that of transformers
  torchax-serve plan qwen3-32b --topology v6e:2x4   would it fit there, and how fast at most
  torchax-serve models                   what is on this machine, and what can be run
  torchax-serve pull qwen3-0.6b          download a model; rm deletes it
  torchax-serve doctor                   what is installed and whether it works, to attach to a bug

Every command explains itself: torchax-serve run --help"""

app = typer.Typer(
    name="torchax-serve",
    help="Any Hugging Face PyTorch model, its code untouched, served by JAX.",
    epilog=EXIT_STATUS_HELP,
    cls=CommandGroup,
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
        typer.echo(FIRST_SCREEN)


for _name, _function in COMMANDS:
    app.command(_name, epilog=EXIT_STATUS_HELP)(with_exit_status(_function))


def main() -> None:
    """Runs the program with the arguments of the process; ends by ``SystemExit``."""
    startup.open_closed_streams()
    try:
        with contextlib.ExitStack() as at_the_end:
            # From the last line of output to the end of the process nothing is left to say.
            at_the_end.callback(startup.leave_at_once_on_interrupt)
            app(prog_name="torchax-serve")
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:
            # Taking torch and jax down in order can last seconds, and who presses Ctrl-C does not want to wait.
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)
        raise
