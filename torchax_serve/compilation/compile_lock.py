"""Lock around compiling; raises in a signal handler that would wait for its own thread."""

from __future__ import annotations

import threading
from types import TracebackType

from model_adapters.errors import TorchaxServeError

_this_thread = threading.local()
_compiling: set[int] = set()  # ids of the locks that are held; set operations are atomic


def num_compiling() -> int:
    """Returns how many programs are being compiled or loaded in this process."""
    return len(_compiling)


def check_not_compiling() -> None:
    """Raises TorchaxServeError in a thread that is compiling, which would deadlock."""
    if getattr(_this_thread, "depth", 0):
        raise TorchaxServeError(
            "expected a call outside of a compilation, got one, as from a signal handler, that interrupted it; call "
            "again when the interrupted code has returned"
        )


class CompileLock:
    """As `threading.Lock`, but a thread that asks for it again gets an error, not a deadlock.

    Args:
        owners: Idents of the threads that hold locks of a group, such as those of one function. A thread that holds any
            lock of the group gets the error.
    """

    def __init__(self, owners: set[int] | None = None) -> None:
        self._lock = threading.Lock()
        self._owners = set() if owners is None else owners

    def __enter__(self) -> None:
        if threading.get_ident() in self._owners:
            check_not_compiling()
        self._lock.acquire()
        self._owners.add(threading.get_ident())
        _compiling.add(id(self))
        _this_thread.depth = getattr(_this_thread, "depth", 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _this_thread.depth -= 1
        self._owners.discard(threading.get_ident())
        _compiling.discard(id(self))
        self._lock.release()
