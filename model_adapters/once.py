"""Functions that change the process, once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def once(function: Function) -> Function:
    """Returns `function`, which runs once for the same arguments, and returns that result again.

    A call in another thread waits for the first one. With ``functools.cache`` alone it would run, too.
    """
    cached, lock = functools.cache(function), threading.RLock()

    @functools.wraps(function)
    def call(*args: object) -> object:
        with lock:
            return cached(*args)

    return call  # type: ignore[return-value]
