"""Warm-up of an engine: compiles every program that traffic can need, while requests run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from model_adapters.errors import TorchaxServeError
from torchax_serve.compilation.background import compile_all
from torchax_serve.engine.model_runner import ModelRunner

if TYPE_CHECKING:
    from model_adapters.loading.progress import Advance, Progress

CLOSED = "expected an open model, this one is closed"

RunOnEngineThread = Callable[[Callable[[], None], Callable[[], None]], None]
"""Runs the first function on the engine's thread between two steps, or the second if the engine is closed."""


def warm_up(
    runner: ModelRunner,
    run_on_engine_thread: RunOnEngineThread,
    close_reason: Callable[[], str | None],
    progress: Progress | None = None,
) -> None:
    """Compiles everything and returns when it is there.

    Args:
        runner: Runner of the model.
        run_on_engine_thread: Runs a function on the engine's thread.
        close_reason: Returns why the engine is closed, if it is.
        progress: Shows the number of programs.

    Raises:
        TorchaxServeError: the engine is closed, or a program cannot be compiled.
    """

    def check_open() -> str | None:
        return None if close_reason() is None else f"a closed engine ({close_reason()})"

    tasks = list(runner.compile_tasks())
    shown: contextlib.AbstractContextManager[Advance] = (
        contextlib.nullcontext(lambda number: None)
        if progress is None
        else progress.stage("compiling programs", len(tasks), "items")
    )
    with shown as advance:
        compile_all(tasks, advance, check_open)
        _call(run_on_engine_thread, runner.warm_up)


def _call(run_on_engine_thread: RunOnEngineThread, function: Callable[[], object]) -> None:
    """Calls a function on the engine's thread, waits for it, and raises what it raises."""
    done = threading.Event()
    errors: list[BaseException] = [TorchaxServeError(CLOSED)]

    def run() -> None:
        errors.clear()
        try:
            function()
        except Exception as error:
            errors.append(error)
        finally:
            done.set()

    run_on_engine_thread(run, done.set)
    done.wait()
    if errors:
        raise errors[0]
