"""Counts and times of inference requests, in the form of Triton's statistics."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

BATCH_SIZE = 1
"""Requests of an execution: each has a forward of its own."""


class Times(NamedTuple):
    """Nanoseconds of the parts of a request that has been answered.

    Attributes:
        compute_input: Reading of its tensors.
        queue: Waiting for the model.
        compute_infer: The forward.
        compute_output: Writing of the answer.
    """

    compute_input: int
    queue: int
    compute_infer: int
    compute_output: int


@dataclasses.dataclass
class Duration:
    """A number of events and their time together.

    Attributes:
        count: Of the events.
        ns: Nanoseconds.
    """

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Counts an event."""
        self.count += 1
        self.ns += ns

    def shown(self) -> dict[str, int]:
        """Returns it in Triton's form."""
        return {"count": self.count, "ns": self.ns}


class InferenceStatistics:
    """Counts and times of a model's requests since it was loaded; used on the event loop alone."""

    def __init__(self) -> None:
        self._success, self._fail = Duration(), Duration()
        self._parts = {name: Duration() for name in Times._fields}
        self._last_ms = 0

    def succeed(self, times: Times) -> None:
        """Counts a request that has been answered."""
        self._success.add(sum(times))
        for name, ns in times._asdict().items():
            self._parts[name].add(ns)
        self._last_ms = int(time.time() * 1000)

    def fail(self, ns: int) -> None:
        """Counts a request that ended with an error after some nanoseconds."""
        self._fail.add(ns)

    def shown(self, name: str, version: str) -> dict[str, Any]:
        """Returns an entry of ``model_stats``."""
        parts = {part: duration.shown() for part, duration in self._parts.items()}
        none = Duration().shown()  # answers are not cached
        ended = {"success": self._success.shown(), "fail": self._fail.shown(), "queue": parts["queue"]}
        computed = {part: parts[part] for part in Times._fields if part != "queue"}
        batch = [{"batch_size": BATCH_SIZE, **computed}] if self._success.count else []
        return {
            "name": name,
            "version": version,
            "last_inference": self._last_ms,
            "inference_count": self._success.count,
            "execution_count": self._success.count,
            "inference_stats": {**ended, **computed, "cache_hit": none, "cache_miss": none},
            "batch_stats": batch,
            "memory_usage": [],
        }
