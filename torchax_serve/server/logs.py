"""Log lines of the server, for people or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from torchax_serve.server.errors import where_of


class TextFormatter(logging.Formatter):
    """Writes a record as a line.

    In place of a traceback, whose error may have parts of a prompt, it says where the error was raised.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatException(self, ei: Any) -> str:
        """Returns the type of an error and where it was raised."""
        return f"    {where_of(ei[1])}"


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object; an access line's own fields are part of it."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        line: dict[str, object] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        message = record.getMessage()
        if record.name.endswith(".access"):
            line |= json.loads(message)
        else:
            line["message"] = message
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = where_of(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False)


def handler(log_format: str) -> logging.Handler:
    """Returns a handler that writes to stderr, as ``text`` or ``json``."""
    found = logging.StreamHandler(sys.stderr)
    found.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    return found
