"""Log lines of the server, for people or as JSON."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from typing import Any, TextIO

from torchax_serve.server.errors import where_of

MAX_LINES = 10_000
"""Lines that wait for a stderr that takes none; further ones are dropped, and counted."""
FLUSH_S = 1.0
"""Seconds that the end of the process waits for the last lines."""


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


class StderrHandler(logging.Handler):
    """Writes lines to stderr in a thread, so that a pipe that nobody reads holds up no request.

    Args:
        stream: Written to instead.
        max_lines: Lines that wait to be written. Further ones are dropped; the next line that is written says how many.
    """

    def __init__(self, stream: TextIO | None = None, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._lines: queue.Queue[str] = queue.Queue(max_lines)
        self._num_dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hands the line of a record over; the lock of the handler is held."""
        try:
            if self._num_dropped:
                dropped = f"{self._num_dropped} log lines were dropped: stderr took none"
                self._lines.put_nowait(self.format(logging.makeLogRecord(_warning(dropped))))
                self._num_dropped = 0
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Waits until all lines are written, for FLUSH_S at most."""
        until = time.monotonic() + FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.001)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # its reader has gone, or it is closed
                pass
            finally:
                self._lines.task_done()


def _warning(message: str) -> dict[str, object]:
    return {"name": "torchax_serve.server", "msg": message, "levelno": logging.WARNING, "levelname": "WARNING"}


def handler(log_format: str, stream: TextIO | None = None) -> logging.Handler:
    """Returns a handler that writes to stderr or to `stream`, as ``text`` or ``json``."""
    found = StderrHandler(stream)
    found.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    return found


def log_to_stderr(log_format: str) -> None:
    """Writes the lines of the server, and warnings of all that it uses, in one format."""
    logging.getLogger().addHandler(handler(log_format))
    for name in ("torchax_serve.server", "torchax_serve.access"):
        logging.getLogger(name).setLevel(logging.INFO)
