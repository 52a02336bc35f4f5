"""Lines of the log about what cannot change answers of requests, each written once."""

from __future__ import annotations

import logging

logger = logging.getLogger("torchax_serve.server")

MAX_NOTES = 1000
"""Most different notes, as names in requests are the clients'."""
_noted: set[str] = set()


def note_once(message: str) -> None:
    """Logs a message unless it has been logged already."""
    if message not in _noted and len(_noted) < MAX_NOTES:
        _noted.add(message)
        logger.info("%s", message)
