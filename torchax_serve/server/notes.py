"""Notes for the log that are written once, however many requests give reason for them."""

from __future__ import annotations

import logging

from torchax_serve.validation.argument_checks import short_repr

logger = logging.getLogger("torchax_serve.server")

MAX_NOTES = 1024
"""Most notes of a server: what they name comes from requests."""


class Notes:
    """Notes that have been written.

    Thread-safe: a note that two threads write at once is written twice at most.
    """

    def __init__(self) -> None:
        self._written: set[tuple[str, str]] = set()

    def once(self, message: str, name: str = "") -> None:
        """Writes a note with a name of the request in it, if it is new.

        Args:
            message: Text with one ``%s`` for the name, if there is one.
            name: What a request has; it is shortened.
        """
        note = message, name[:100]
        if note in self._written or len(self._written) >= MAX_NOTES:
            return
        self._written.add(note)
        logger.warning(message, *([short_repr(note[1])] if name else []))
