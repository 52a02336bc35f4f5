"""Batches: their state on disk, which changes from one whole record to the next."""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchax_serve.server.batch.files import FileStore, new_file_id
from torchax_serve.server.batch.records import Records, storage_errors
from torchax_serve.server.errors import ApiError, bad_request

logger = logging.getLogger("torchax_serve.server")

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""States that stay."""
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 86400


@dataclasses.dataclass
class BatchJob:
    """A batch. What is not counts changes by `BatchJobs` alone.

    Attributes:
        id: Its name, which cannot be guessed.
        owner: Whose it is.
        endpoint: Route of its requests.
        input_file_id: File with its requests.
        window: Time in which it is to be completed, as it was given.
        created_s: When it was made, in seconds since 1970.
        expires_s: When it ends with what it has.
        output_id, error_id: Files of its answers and errors.
        metadata: What its owner has given.
        output_age_s: Seconds for which these are stored; None: as any file.
        status: ``validating``, ``in_progress``, ``finalizing``, ``completed``, ``failed``, ``cancelling`` ...
        ending: State that it will have when its files are there; None before.
        times: When it came into each state.
        has_output, has_errors: Whether there is a file of answers, and one of errors.
        errors: Why it has failed.
        total, completed, failed: Requests, those with an answer, and those with an error.
        model: The model that all lines name; None if they name several or none, or before they are read.
        usage: Tokens of the answers; None before the first.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    window: str
    created_s: int
    expires_s: int
    output_id: str
    error_id: str
    metadata: dict[str, str] | None = None
    output_age_s: int | None = None
    status: str = "validating"
    ending: str | None = None
    times: dict[str, int] = dataclasses.field(default_factory=dict)
    has_output: bool = False
    has_errors: bool = False
    errors: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    model: str | None = None
    usage: dict[str, Any] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether nothing changes any more."""
        return self.status in ENDED

    def shown(self) -> dict[str, Any]:
        """Returns the batch as OpenAI's interface has it."""
        states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{state}_at": self.times.get(state) for state in states},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage,
            "metadata": self.metadata,
        }


class BatchJobs:
    """Batches by id. Calls may come from any thread.

    Args:
        folder: Folder of their records.
        files: Store of their files.
        clock: Seconds since 1970.
    """

    def __init__(self, folder: Path, files: FileStore, clock: Callable[[], float] = time.time) -> None:
        self.files = files
        self._clock = clock
        self._lock = threading.RLock()
        self._records = Records(folder)
        self._batches: dict[str, BatchJob] = {}
        self.on_change: Callable[[], None] = lambda: None
        for record in self._records.load():
            try:
                batch = BatchJob(**record)
            except TypeError:
                logger.warning("the batch %s has a form of another version, and is left as it is", record["id"])
                continue
            self._batches[batch.id] = batch
            if not batch.is_ended:
                files.restore_pin(batch.input_file_id)
        files.sweep({each for batch in self.unfinished() for each in (batch.output_id, batch.error_id)})

    def create(
        self,
        owner: str,
        endpoint: str,
        input_file_id: str,
        window: str,
        metadata: dict[str, str] | None,
        output_age_s: int | None,
    ) -> BatchJob:
        """Makes a batch.

        Raises:
            ApiError: 404 if there is no such file, 400 if it is none of requests, or if the owner has too many
                batches; 503 if it cannot be written.
        """
        window_s = window_seconds(window)
        with self._lock:
            file = self.files.pin(owner, input_file_id)
            try:
                if file.purpose != "batch":
                    message = f"input_file_id: expected a file with purpose batch, got {file.purpose}"
                    raise bad_request(message, "input_file_id", "invalid_value")
                self._make_room(owner)
                now = int(self._clock())
                batch = BatchJob(
                    id=f"batch_{secrets.token_hex(16)}",
                    owner=owner,
                    endpoint=endpoint,
                    input_file_id=input_file_id,
                    window=window,
                    created_s=now,
                    expires_s=now + window_s,
                    output_id=new_file_id(),
                    error_id=new_file_id(),
                    metadata=metadata,
                    output_age_s=output_age_s,
                )
                with storage_errors():
                    self._records.put(dataclasses.asdict(batch))
            except BaseException:
                self.files.unpin(input_file_id)
                raise
            self._batches[batch.id] = batch
        self.on_change()
        return batch

    def get(self, owner: str, batch_id: str) -> BatchJob:
        """Returns a batch of an owner; raises ApiError, 404, if there is none."""
        with self._lock:
            found = self._batches.get(batch_id)
            if found is None or found.owner != owner or self._is_old(found):
                message = "expected the id of a batch of this key, got one that is unknown or was dropped"
                raise ApiError(404, f"batch_id: {message}; GET /v1/batches lists those that are", param="batch_id")
            return found

    def list(self, owner: str) -> list[BatchJob]:
        """Returns the batches of an owner, the newest first."""
        with self._lock:
            found = [each for each in self._batches.values() if each.owner == owner and not self._is_old(each)]
        return sorted(found, key=lambda each: (each.created_s, each.id), reverse=True)

    def unfinished(self) -> Sequence[BatchJob]:
        """Returns the batches that have not ended, the oldest first."""
        with self._lock:
            found = [each for each in self._batches.values() if not each.is_ended]
        return sorted(found, key=lambda each: (each.created_s, each.id))

    def cancel(self, owner: str, batch_id: str) -> BatchJob:
        """Has a batch end without its further answers.

        Raises:
            ApiError: 404 if there is none, 409 if it has ended, 503 if the disk refuses.
        """
        with self._lock:
            batch = self.get(owner, batch_id)
            if batch.status != "cancelling":
                if batch.status not in ("validating", "in_progress"):
                    message = f"expected a batch that runs, got one that is {batch.status}"
                    raise ApiError(409, f"batch_id: {message}", param="batch_id", code="conflict")
                with storage_errors():
                    self._change(batch, {"status": "cancelling"})
        self.on_change()
        return batch

    def begin(self, batch: BatchJob) -> None:
        """Has a batch be in progress, unless it is being cancelled. Raises OSError."""
        with self._lock:
            if batch.status == "validating":
                self._change(batch, {"status": "in_progress"})

    def begin_ending(self, batch: BatchJob, ending: str) -> None:
        """Decides how a batch ends, once its answers are all on the disk. Raises OSError."""
        with self._lock:
            if batch.status == "cancelling":
                self._change(batch, {"ending": "cancelled"})
            else:
                self._change(batch, {"status": "finalizing", "ending": ending})

    def fail(self, batch: BatchJob, errors: Sequence[Mapping[str, Any]]) -> None:
        """Ends a batch that cannot be answered. Raises OSError."""
        self._end(batch, {"status": "failed", "errors": list(errors)})

    def publish(self, batch: BatchJob) -> None:
        """Ends a batch and makes its files. Raises OSError, after which it may be called again."""
        found: dict[str, bool] = {}
        for name, file_id, kind in (
            ("has_output", batch.output_id, "output"),
            ("has_errors", batch.error_id, "error"),
        ):
            part, content = self.files.part_path(file_id), self.files.content_path(file_id)
            if part.exists() and not part.stat().st_size:
                part.unlink()
            if found.setdefault(name, part.exists() or content.exists()):
                self.files.add(file_id, batch.owner, f"{batch.id}_{kind}.jsonl", "batch_output", batch.output_age_s)
        self._end(batch, {"status": batch.ending, **found})

    def drop_old(self) -> None:
        """Deletes batches that have ended long ago. Raises OSError."""
        with self._lock:
            for batch in [each for each in self._batches.values() if self._is_old(each)]:
                self._drop(batch)

    def _end(self, batch: BatchJob, changes: Mapping[str, Any]) -> None:
        with self._lock:
            self._change(batch, changes)
            self.files.unpin(batch.input_file_id)

    def _change(self, batch: BatchJob, changes: Mapping[str, Any]) -> None:
        """Writes a batch with changes, and has them take effect once they are on the disk."""
        times = batch.times
        if "status" in changes:
            times = times | {changes["status"]: int(self._clock())}
        self._records.put(dataclasses.asdict(batch) | {"times": times} | dict(changes))
        batch.times = times
        for name, value in changes.items():
            setattr(batch, name, value)

    def _make_room(self, owner: str) -> None:
        """Drops the oldest batches that have ended, as far as the owner has too many."""
        most = self.files.limits.max_files
        own = [each for each in self._batches.values() if each.owner == owner]
        ended = sorted((each for each in own if each.is_ended), key=lambda each: each.created_s)
        if len(own) - len(ended) >= most:
            message = f"expected at most {most} batches of a key that have not ended, got one more; cancel some"
            raise bad_request(message, None, "storage_full")
        for batch in ended[: max(0, len(own) + 1 - most)]:
            with storage_errors():
                self._drop(batch)

    def _drop(self, batch: BatchJob) -> None:
        self._records.drop(batch.id)
        del self._batches[batch.id]

    def _is_old(self, batch: BatchJob) -> bool:
        return batch.is_ended and batch.times[batch.status] + self.files.limits.max_age_s <= self._clock()


def window_seconds(window: str) -> int:
    """Returns the seconds of a `completion_window` such as ``24h``.

    Raises:
        ApiError: 400.
    """
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        message = f"completion_window: expected a time such as 24h, at most {MAX_WINDOW_S // 86400}d, got "
        raise bad_request(f"{message}{window[:40]!r}", "completion_window", "invalid_value")
    return seconds
