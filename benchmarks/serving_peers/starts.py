"""From the start of a process to its first token, the tokens behind it, and the memory that took."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from serving_peers.jobs import Arrival, Job
from serving_peers.processes import System, Worker

NEXT_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class StartTimes:
    """Of one start.

    Attributes:
        ready_s: from the start of the process until it took requests.
        first_token_s: from the start of the process until the first token of a request that was there at once.
        next_tokens_s: the `NEXT_TOKENS` tokens behind it.
        peak_bytes: highest resident memory of the process and of those it started.
    """

    ready_s: float
    first_token_s: float
    next_tokens_s: float
    peak_bytes: int


def measure_start(system: System, prompt_ids: list[int], log: Path, timeout_s: float = 600.0) -> StartTimes:
    """Starts `system`, asks it one greedy request, and ends it.

    Raises:
        RuntimeError: it ended or did not answer; the message has the end of its log.
    """
    with Worker(system, log, timeout_s) as worker:
        asked_s = worker.age_s()
        times_s = worker.run(Job([Arrival(prompt_ids, 1 + NEXT_TOKENS)])).traces[0].token_times_s
        return StartTimes(worker.ready_s, asked_s + times_s[0], times_s[-1] - times_s[0], worker.peak_bytes())


def median_start(starts: Sequence[StartTimes]) -> StartTimes:
    """The median of each number; of memory the highest."""
    seconds = ("ready_s", "first_token_s", "next_tokens_s")
    medians = {name: statistics.median(getattr(each, name) for each in starts) for name in seconds}
    return StartTimes(**medians, peak_bytes=max(each.peak_bytes for each in starts))
