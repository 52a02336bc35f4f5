"""One warning for a cache folder that cannot be written, whatever it is for."""

from __future__ import annotations

import logging

logger = logging.getLogger("torchax_serve")

_WARNED: list[str] = []


def report_unwritable(reason: str) -> None:
    """Logs that something is not stored: the first time in a process as a warning."""
    level = logging.INFO if _WARNED else logging.WARNING
    _WARNED.append(reason)
    logger.log(level, "%s; until it can be written every start compiles anew; choose another by XDG_CACHE_HOME", reason)
