"""The lines of a batch's file before they are sent, and those of a run that was killed."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from torchax_serve.server.batch.lines import BatchRequest, LineError, encoded, read_lines
from torchax_serve.server.batch.records import write_all

MAX_ERRORS = 100
"""Most errors of a file that a batch lists."""
MAX_LINES = 5_000_000
"""Most lines of a file: two bytes of memory each while it runs, and twenty more while it is read first."""
MAX_MODELS = 1 << 15
PAUSE_LINES, PAUSE_SHARE = 200, 1.0
"""Lines after which reading pauses, and for how much of the time that they took: requests have the processor then."""
_NUMBER = re.compile(rb'\{"id":"batch_req_[0-9a-f]{32}_([0-9]{1,9})",')
DONE = 0


@dataclasses.dataclass
class Scan:
    """What the first reading of a file has found.

    Attributes:
        model_of: For each line, from 1, 1 + the place of its model in `models`; `DONE` where nothing is to be sent.
        models: Names of models, in the order in which lines name them.
        total: Number of requests.
        errors: What is wrong with lines, as a batch lists it.
    """

    model_of: array.array[int]
    models: list[str]
    total: int
    errors: list[dict[str, Any]]


def scan(
    file: BinaryIO,
    max_bytes: int,
    parse: Callable[[int, bytes | None], BatchRequest],
    model_error: Callable[[str], str | None],
    is_stopped: Callable[[], bool],
) -> Scan | None:
    """Reads all lines of a file once; returns None if it is stopped.

    Args:
        file: The file.
        max_bytes: Longest line.
        parse: Returns the request of a line, or raises `LineError`.
        model_error: Returns why the name of a model is wrong; None for a right one.
        is_stopped: Whether to stop.
    """
    found = Scan(array.array("H", [DONE]), [], 0, [])
    places: dict[str, int] = {}
    digests, began_s = bytearray(), time.monotonic()
    for number, content in read_lines(file, max_bytes):
        if number > MAX_LINES:
            message = f"expected at most {MAX_LINES} lines, got more; split the file"
            return dataclasses.replace(found, errors=[_error(LineError(number, message), "too_many_lines")])
        found.model_of.extend([DONE] * (number - len(found.model_of) + 1))
        try:
            request = parse(number, content)
            name = request.body.get("model") or ""
            wrong = model_error(name) if isinstance(name, str) and name not in places else None
            if wrong is not None:
                raise LineError(number, wrong, request.custom_id)
            place = places.setdefault(name if isinstance(name, str) else "", len(places))
            if place >= MAX_MODELS:
                raise LineError(number, f"expected at most {MAX_MODELS} models, got more", request.custom_id)
            found.model_of[number] = 1 + place
            digests += hashlib.blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            digests += number.to_bytes(4, "little")
            found.total += 1
        except LineError as error:
            found.errors.append(_error(error, "invalid_line"))
            if len(found.errors) >= MAX_ERRORS:
                return found
        if number % PAUSE_LINES == 0:
            if is_stopped():
                return None
            time.sleep(PAUSE_SHARE * (time.monotonic() - began_s))
            began_s = time.monotonic()
    found.models = list(places)
    found.errors += _repeated(digests)[: MAX_ERRORS - len(found.errors)]
    if not found.total and not found.errors:
        found.errors.append(_error(LineError(0, "expected at least one request, got an empty file"), "empty_file"))
    return found


def _repeated(digests: bytes | bytearray) -> list[dict[str, Any]]:
    """Returns the errors of repeated `custom_id`, from their digests and numbers of lines."""
    rows = np.frombuffer(digests, dtype=[("high", "<u8"), ("low", "<u8"), ("line", "<u4")])
    order = np.lexsort((rows["line"], rows["low"], rows["high"]))
    same = (np.diff(rows["high"][order]) == 0) & (np.diff(rows["low"][order]) == 0)
    places = np.flatnonzero(same)
    numbers = rows["line"][order[places + 1]]
    found = []
    for place in np.argsort(numbers)[:MAX_ERRORS]:
        first = places[place]
        while first and same[first - 1]:
            first -= 1
        message = f"custom_id: expected one of its own, got that of line {rows['line'][order[first]]}; rename it"
        found.append(_error(LineError(int(numbers[place]), message), "duplicate_custom_id"))
    return found


def _error(error: LineError, code: str) -> dict[str, Any]:
    return {"code": code, "line": error.line or None, "message": error.message, "param": None}


def line_id(batch_id: str, number: int) -> str:
    """Returns the id of the answer to a line of a batch, from which a later run reads the line."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


class PartialResults:
    """Lines that a batch has so far, at the end of which further ones are written.

    Args:
        path: Their file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        self.num_bytes = 0

    def recover(self) -> Iterator[tuple[int, bytes]]:
        """Yields numbers and contents of the lines that are there; a last one without its end goes."""
        with os.fdopen(os.dup(self._file.fileno()), "rb") as file:
            file.seek(0)
            for line in file:
                match = _NUMBER.match(line)
                if match is None or not line.endswith(b"}\n"):
                    break
                self.num_bytes += len(line)
                yield int(match[1]), line
        self._file.truncate(self.num_bytes)

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line; raises OSError, and nothing of it is there then."""
        content = encoded(dict(line))
        self._file.seek(self.num_bytes)
        try:
            write_all(self._file, content)
        except BaseException:
            self._file.truncate(self.num_bytes)
            raise
        self.num_bytes += len(content)

    def close(self) -> None:
        """Brings the lines to the disk, and ends writing."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
