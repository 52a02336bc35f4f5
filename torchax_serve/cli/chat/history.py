"""Messages typed in earlier chats, for the arrow keys and Ctrl-R.

They are in a private file of the user.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from torchax_serve.cli.shared.terminal import print_note

MAX_MESSAGES = 1000
"""Number of messages that are read; the file may have twice as many before the oldest are dropped."""


def history_file() -> Path:
    """Returns ``torchax-serve/history`` in the user's state folder.

    This folder is XDG_STATE_HOME, or ``~/.local/state``.
    """
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "torchax-serve" / "history"


def private_history() -> History:
    """Returns the history in `history_file`, readable only by its owner.

    It is in memory if there can be no file.
    """
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
    """History in a file of bounded size that only its owner may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def load_history_strings(self) -> Iterable[str]:
        """Yields the newest `MAX_MESSAGES` messages, the newest first."""
        messages = list(super().load_history_strings())
        if len(messages) > 2 * MAX_MESSAGES:
            self._write(messages[:MAX_MESSAGES])
        return messages[:MAX_MESSAGES]

    def store_string(self, string: str) -> None:
        """Adds a message; if the file cannot be written any more, only in memory."""
        try:
            os.close(_opened(self._path, os.O_RDWR))  # somebody may have removed it meanwhile
            super().store_string(string)
        except OSError:
            return

    def _write(self, newest_first: list[str]) -> None:
        """Replaces the content of the file by `newest_first`, atomically."""
        path = self._path
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        os.close(_opened(partial, os.O_RDWR | os.O_TRUNC))
        rewritten = FileHistory(partial)
        for message in reversed(newest_first):
            rewritten.store_string(message)
        os.replace(partial, path)


def _opened(path: Path, flags: int) -> int:
    """Opens `path`, created if missing, with permissions for its owner only."""
    descriptor = os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
