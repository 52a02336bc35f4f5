"""Number of prompt tokens that a step with decode rows may compute.

The limit protects the latency of running requests.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 16  # steps that a median is taken over; compilations among them do no harm
SAFETY = 0.9  # of the seconds allowed: a median of so few steps may be off by this much
MEASURE_EVERY = 64  # steps with prefill after which one without measures the pace anew


class PrefillBudget:
    """A budget of seconds that prefill may take from running requests.

    A step without prefill takes ``d`` seconds (a running median for each power of two of decode rows, as steps are
    padded); a prompt token in a step with decode rows takes ``c`` more (a running median). Every step with decode
    rows earns nearly ``(max_slowdown - 1) * d`` seconds of credit, prefill spends ``c`` a token, and what a step really
    took is charged when it is known. So the mean time per token stays within `max_slowdown` times ``d`` even where the
    shortest chunk takes longer than ``d``: it waits for a few steps, and then always comes. Credit is capped at what a
    step earns, or what the shortest chunk costs if that is more, so that an idle time buys no burst.

    The budget is a token bucket; limiting prefill in steps with decode rows is Sarathi-Serve's (Agrawal et al., 2024).
    """

    def __init__(self, min_chunk: int, max_slowdown: float) -> None:
        self._min_chunk = min_chunk
        self._earning = SAFETY * (max_slowdown - 1)
        self._decode_s: dict[int, deque[float]] = {}
        self._token_s: deque[float] = deque(maxlen=WINDOW)
        self._since_probe: dict[int, int] = {}
        self._credit_s = 0.0
        self._charged_s: dict[int, float] = {}  # by step in flight

    @staticmethod
    def _bucket(num_decode: int) -> int:
        return (num_decode - 1).bit_length()

    def decode_step_s(self, num_decode: int) -> float | None:
        """Returns the expected seconds of a step of `num_decode` decode rows only; None if unknown.

        Where steps of this size have not been seen, those of the next smaller size stand in, else the next larger.
        """
        bucket = self._bucket(num_decode)
        known = self._decode_s.keys()
        nearest = max((b for b in known if b <= bucket), default=min((b for b in known if b > bucket), default=None))
        return None if nearest is None else statistics.median(self._decode_s[nearest])

    def steps_within(self, seconds: float, num_decode: int) -> float:
        """Returns how many steps of `num_decode` decode rows fit in `seconds`, at least 1.

        The result is 1 if no step was measured.
        """
        if math.isinf(seconds):
            return seconds
        step_s = self.decode_step_s(num_decode)
        if step_s is None:
            return 1
        return max(1, seconds / step_s) if step_s else math.inf

    @property
    def prefill_token_s(self) -> float | None:
        """Expected seconds that a prompt token adds to a step with decode rows.

        None before any was measured.
        """
        return statistics.median(self._token_s) if self._token_s else None

    def limit(self, num_decode: int, token_budget: int) -> int:
        """Returns the maximum number of prompt tokens for a step with `num_decode` decode rows.

        It is at most `token_budget`. 0 means that this step decodes only: the credit is spent, or the pace is to be
        measured. Call the method once for each step.
        """
        if not num_decode:
            return token_budget
        bucket = self._bucket(num_decode)
        since_probe = self._since_probe.get(bucket, MEASURE_EVERY)
        if since_probe >= MEASURE_EVERY:
            self._since_probe[bucket] = 0
            self._refill(num_decode)
            return 0
        self._since_probe[bucket] = since_probe + 1
        token_s = self.prefill_token_s
        if self.decode_step_s(num_decode) is None or token_s is None:
            return min(self._min_chunk, token_budget)  # to learn from
        self._refill(num_decode)
        if token_s <= 0:
            return token_budget
        affordable = int(self._credit_s / token_s + 1e-9)
        return min(affordable, token_budget) if affordable >= self._min_chunk else 0

    def _refill(self, num_decode: int) -> None:
        earned = self._earning * (self.decode_step_s(num_decode) or 0.0)
        cap = max(earned, self._min_chunk * (self.prefill_token_s or 0.0))
        self._credit_s = min(self._credit_s + earned, cap)

    def charge(self, step: int, num_decode: int, num_prefill_tokens: int) -> None:
        """Spends the expected cost of a step that has just been planned.

        A step for which this is not called costs nothing.
        """
        if num_decode and num_prefill_tokens:
            self._charged_s[step] = num_prefill_tokens * (self.prefill_token_s or 0.0)
            self._credit_s -= self._charged_s[step]

    def record(
        self, step: int, num_decode: int, num_prefill_tokens: int, num_steps: int, duration_s: float | None
    ) -> None:
        """Updates the estimates with a step that took `duration_s` seconds.

        They are the seconds of all `num_steps` together; None if unknown.
        """
        expected = self._charged_s.pop(step, None)
        if not num_decode or duration_s is None:
            return
        if not num_prefill_tokens:
            durations = self._decode_s.setdefault(self._bucket(num_decode), deque(maxlen=WINDOW))
            durations.append(duration_s / num_steps)
            return
        base = self.decode_step_s(num_decode)
        if base is None:
            return
        extra = max(0.0, duration_s - base)
        self._token_s.append(extra / num_prefill_tokens)
        if expected is None:
            return
        # A step that compiled may have taken a thousand times as long: it must not stop prefill for a minute.
        lowest = -4 * max(base, self._min_chunk * statistics.median(self._token_s))
        self._credit_s = max(self._credit_s + expected - extra, lowest)
