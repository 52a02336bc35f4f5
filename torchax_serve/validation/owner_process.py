"""Objects that belong to the process that made them.

XLA's and the engine's threads do not survive a fork.
"""

from __future__ import annotations

import os

from model_adapters.errors import TorchaxServeError


class OwnerProcess:
    """Process in which an object was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this code runs in that process, not in a child forked from it."""
        return os.getpid() == self._pid

    def check(self, what: str = "a model") -> None:
        """Raises TorchaxServeError in a forked child.

        There a call would wait for threads that only the parent has.
        """
        if not self.is_current:
            raise TorchaxServeError(
                f"expected {what} made in this process, got that of process {self._pid}, from which this one was "
                'forked; call serve() in the child, or start it with multiprocessing\'s "spawn"'
            )


_this_process = OwnerProcess()


def this_process() -> OwnerProcess:
    """Returns this process, for objects of which there are many."""
    global _this_process
    if not _this_process.is_current:  # a forked child
        _this_process = OwnerProcess()
    return _this_process
