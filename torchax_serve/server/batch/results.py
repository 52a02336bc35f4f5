"""The output of a batch: a line for each request as it ends, which a later run can continue."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.batch.lines import encoded


class BatchResults:
    """Writes results; each is on its way to the disk before the next one is.

    Args:
        file: What they are written to.
        answered: `custom_id` of requests that an earlier run has answered.
    """

    def __init__(self, file: BinaryIO, answered: frozenset[str] = frozenset()) -> None:
        self._file, self.answered = file, answered

    def write(self, line: dict[str, Any]) -> None:
        """Writes a line."""
        self._file.write(encoded(line))
        self._file.flush()


@contextlib.contextmanager
def open_results(path: Path | None, *, resume: bool, overwrite: bool) -> Iterator[BatchResults]:
    """Yields the results at `path`, or on stdout if that is None.

    With `resume` the answers of an earlier run stay; its errors, and a line that it could not finish, go.

    Raises:
        InvalidArgumentError: The file cannot be written, has lines without being asked to go on, or has others than
            those of a batch.
    """
    if path is None:
        yield BatchResults(sys.stdout.buffer)
        return
    answered: frozenset[str] = frozenset()
    try:
        if resume and path.exists():
            answered = _keep_answers(path)
        elif not overwrite and path.exists() and path.stat().st_size:
            raise InvalidArgumentError(
                f"OUTPUT: expected no file or an empty one, got {path}; --resume goes on with it, --overwrite drops it"
            )
        file = path.open("ab" if resume else "wb")
    except OSError as error:
        raise InvalidArgumentError(
            f"OUTPUT: expected a file that can be written, got {path} ({error.strerror}); choose another"
        ) from error
    with file:
        yield BatchResults(file, answered)


def _keep_answers(path: Path) -> frozenset[str]:
    """Rewrites an earlier run's output with its answers alone; returns their `custom_id`."""
    kept = path.with_name(f".{path.name}.resumed")
    answered: set[str] = set()
    try:
        with path.open("rb") as file, kept.open("wb") as target:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # the run was killed while it wrote this one
                    break
                name = _answered(path, number, line)
                if name is not None and name not in answered:
                    answered.add(name)
                    target.write(line)
            target.flush()
            os.fsync(target.fileno())
        kept.replace(path)
    finally:
        kept.unlink(missing_ok=True)
    return frozenset(answered)


def _answered(path: Path, number: int, line: bytes) -> str | None:
    """Returns the `custom_id` of a line with an answer; None for one with an error."""
    try:
        found = json.loads(line)
        name, response = found["custom_id"], found["response"]
        is_result = {"id", "error"} <= found.keys() and isinstance(name, str | None)
        status = None if response is None else response["status_code"]
    except (ValueError, KeyError, TypeError):
        is_result = False
    if not is_result:
        raise InvalidArgumentError(
            f"OUTPUT: expected the lines of an earlier run, got another in line {number} of {path}; choose another file"
        )
    return name if status == 200 else None
