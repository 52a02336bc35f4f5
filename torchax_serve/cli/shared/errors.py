"""End of every command: one line on stderr for an error, and the exit status.

Nothing is printed if the reader has gone. Exit statuses: 0 done; 1 a check found a difference; 2 an error that the
line explains, or wrong usage; 70 an error in this program (``EX_SOFTWARE`` of sysexits.h); 130 interrupted (128 +
SIGINT); 141 stdout was closed (128 + SIGPIPE).
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from model_adapters.errors import TorchaxServeError
from torchax_serve.cli.shared.flag_names import flags_of, in_flags

EXIT_ERROR = 2
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
EXIT_STATUS_HELP = "Exit status: 0 done, 1 a check failed, 2 an error (one line on stderr says which), 130 interrupted."

DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and what the libraries underneath have to say.")
]

_OWN = ("__main__", "torchax_serve", "model_adapters", "pytree_registry", "sharding_rules", "transformers")
# Set before the libraries are imported; a variable that the user has set stays.
_QUIET_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "GLOG_minloglevel": "3",
    "ABSL_MIN_LOG_LEVEL": "3",
}


def quiet_libraries() -> None:
    """Turns off warnings and log lines of torch, jax and transformers on the terminal.

    Call it before they are imported.
    """
    import logging

    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    for name in ("jax", "jax._src", "torch", "transformers", "huggingface_hub", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)


def one_line(error: BaseException) -> str:
    """Returns the message of `error` on one line, or the name of its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def print_error(message: str) -> None:
    """Writes ``error: message`` to stderr, if stderr can still be written to."""
    try:
        print(f"error: {message}", file=sys.stderr, flush=True)
    except OSError:
        drop_output(sys.stderr)


def drop_output(stream: Any) -> None:
    """Makes later writes and the flush at exit succeed after the reader of `stream` has gone.

    Python flushes stdout once more while it ends and would print a second ``BrokenPipeError``
    (https://docs.python.org/3/library/signal.html#note-on-sigpipe).
    """
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def run_and_report(function: Callable[[], int | None], *, debug: bool, flags: Mapping[str, str] | None = None) -> int:
    """Calls `function`, prints its error if there is one, and returns the exit status.

    Errors about Python arguments name the `flags` (by argument) instead.
    """
    try:
        status = function() or 0
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output(sys.stdout)
        return EXIT_CLOSED_PIPE
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        drop_output(sys.stdout)  # rich has met a closed stdout, and would leave with 1
        return EXIT_CLOSED_PIPE
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except TorchaxServeError as error:
        if debug:
            traceback.print_exc()
        print_error(in_flags(one_line(error), flags or {}))
        return EXIT_ERROR
    except Exception as error:
        if isinstance(error, typer.Exit | typer.Abort | typer.BadParameter):
            raise
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            drop_output(sys.stdout)
            print_error(
                f"expected room to write {error.filename or 'the output'}, got none ({error.strerror}); free some, or "
                "write elsewhere"
            )
            return EXIT_ERROR
        broken = _broken_package(error)
        hint = (
            "--debug shows where" if broken is None else f"{broken} cannot be imported; torchax-serve doctor says more"
        )
        print_error(f"{type(error).__name__} inside the program: {one_line(error)} ({hint})")
        return EXIT_INTERNAL
    return status


def _broken_package(error: BaseException) -> str | None:
    """Returns the package of another author whose import raised `error`; None if none did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_code.co_name == "<module>" and name not in _OWN:
            return str(name)
    # transformers raises an error of its own from that of the import.
    return None if error.__cause__ is None else _broken_package(error.__cause__)


def with_exit_status(command: Callable[..., int | None]) -> Callable[..., None]:
    """Returns `command` with ``--debug``, quiet libraries, one-line errors and exit statuses."""

    @functools.wraps(command)
    def call(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        if not debug:
            quiet_libraries()
        status = run_and_report(lambda: command(*args, **kwargs), debug=debug, flags=flags)
        if status == EXIT_INTERRUPTED:
            raise SystemExit(status)
        if status:
            raise typer.Exit(status)

    # Typer reads the options of a command from its signature.
    signature, hints = inspect.signature(command), typing.get_type_hints(command, include_extras=True)
    parameters = [p.replace(annotation=hints[name]) for name, p in signature.parameters.items()]
    flags = flags_of(parameters)
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption)
    call.__signature__ = signature.replace(parameters=[*parameters, option])  # type: ignore[attr-defined]
    call.__annotations__ = {**hints, "debug": DebugOption}
    return call
