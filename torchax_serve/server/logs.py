"""Log lines of the server, for people or as JSON."""

from __future__ import annotations

import json
import logging
import sys


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
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
        return json.dumps(line, ensure_ascii=False)


def handler(log_format: str) -> logging.Handler:
    """Returns a handler that writes to stderr, as ``text`` or ``json``."""
    found = logging.StreamHandler(sys.stderr)
    found.setFormatter(
        JsonFormatter() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    return found
