"""`TorchSide`: the torch module of a model, loaded once it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

from torchax_serve.compilation.background import wait_for_work

MIN_WORK_S = 3.0
"""Seconds of work after which a program that others stand in for is worth loading torch, which takes as long."""


class TorchSide:
    """The torch module of a model, loaded at the first use of what a record does not have.

    Args:
        load: Loads it.
        loaded: The same, if it is there already.

    Attributes:
        loaded: The torch module with its runtimes; None until it is needed.
    """

    def __init__(self, load: Callable[[], Any], loaded: Any = None) -> None:
        self._load, self._lock = load, threading.RLock()
        self.loaded: Any = loaded

    def get(self) -> Any:
        """Returns the module with its runtimes, which are loaded now if they were not.

        Loading waits for traces in other threads. So a thread that traces calls it once before it begins.
        """
        if self.loaded is not None:
            return self.loaded
        with self._lock:
            if self.loaded is None:
                with jax.ensure_compile_time_eval():  # may be needed inside a trace, which the arrays must not join
                    self.loaded = self._load()
            return self.loaded

    def get_before_trace(self) -> None:
        """Loads what a trace needs; in the background only behind longer work."""
        if self.loaded is None:
            wait_for_work(MIN_WORK_S)
            self.get()
