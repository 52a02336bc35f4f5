"""The messages typed in earlier chats: a file of the user's own, for the arrow keys and Ctrl-R."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from torchax_serve.cli.shared.terminal import print_note

MOST_MESSAGES = 1000
"""That are read; twice as many may lie in the file before the oldest are dropped."""


def history_file() -> Path:
    """Where it lies: ``torchax-serve/history`` in the user's state folder (XDG_STATE_HOME, ``~/.local/state``)."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "torchax-serve" / "history"


def private_history() -> History:
    """The history in `history_file`, readable by its owner alone; one in memory where there can be none."""
    try:
        path = history_file()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(_opened(path, os.O_RDWR))
        return PrivateHistory(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        reason = getattr(error, "strerror", None) or error
        print_note(f"what is typed is not kept for the next time: {reason} (--no-history leaves this note out)")
        return InMemoryHistory()


class PrivateHistory(FileHistory):
    """A history in a file that only its owner may read, and that does not grow without end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def load_history_strings(self) -> Iterable[str]:
        """The newest `MOST_MESSAGES` messages, the newest first."""
        messages = list(super().load_history_strings())
        if len(messages) > 2 * MOST_MESSAGES:
            self._write(messages[:MOST_MESSAGES])
        return messages[:MOST_MESSAGES]

    def store_string(self, string: str) -> None:
        """Adds a message; where that cannot be done any more it is kept in memory alone."""
        try:
            os.close(_opened(self._path, os.O_RDWR))  # somebody may have removed it meanwhile
            super().store_string(string)
        except OSError:
            return

    def _write(self, newest_first: list[str]) -> None:
        """Puts `newest_first` in the place of what the file has, at once."""
        path = self._path
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        os.close(_opened(partial, os.O_RDWR | os.O_TRUNC))
        rewritten = FileHistory(partial)
        for message in reversed(newest_first):
            rewritten.store_string(message)
        os.replace(partial, path)


def _opened(path: Path, flags: int) -> int:
    """A descriptor of `path`, made where it is missing, and taken from everybody but its owner."""
    descriptor = os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
