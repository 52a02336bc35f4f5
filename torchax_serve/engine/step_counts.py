"""Counts and times of an engine's steps, from which its statistics are made."""

from __future__ import annotations

import collections
import time

from torchax_serve.outputs import EngineStats, SchedulerStats

RATE_S = 10.0
"""Seconds over which the rate of new tokens is taken."""


class StepCounts:
    """Counts since the start; written by the engine's thread, read by any.

    Attributes:
        num_steps: Steps whose tokens were read.
        wait_s: Seconds of the engine's thread in which it waited for the device.
        busy_s: Seconds of the engine's thread with something to do, waits included.
    """

    def __init__(self) -> None:
        self.num_steps, self.wait_s, self.busy_s = 0, 0.0, 0.0
        self._tokens: collections.deque[tuple[float, int]] = collections.deque(maxlen=512)

    def add(self, now: float, num_steps: int, num_tokens: int) -> None:
        """Counts steps that were read at `now` seconds, and their new tokens."""
        self.num_steps += num_steps
        self._tokens.append((now, num_tokens))

    def stats(self, scheduler: SchedulerStats, num_programs: int) -> EngineStats:
        """Returns the statistics of the engine, with those of its scheduler."""
        now = time.monotonic()
        recent = [(when, count) for when, count in list(self._tokens) if now - when < RATE_S]
        span = now - recent[0][0] if recent else 0.0
        return EngineStats(
            scheduler=scheduler,
            num_programs=num_programs,
            num_steps=self.num_steps,
            tokens_per_s=sum(count for _, count in recent) / span if span > 0 else 0.0,
            host_s=max(0.0, self.busy_s - self.wait_s),
            busy_s=self.busy_s,
        )
