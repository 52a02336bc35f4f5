"""Number of prompt tokens that a step with decode rows may compute.

The limit protects the latency of running requests.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 16  # steps that a median is taken over; compilations among them do no harm
SAFETY = 0.9  # of the seconds allowed: a median of so few steps may be off by this much
MEASURE_EVERY = 64  # steps with prefill after which one without measures the pace anew


TTFT_SAFETY = 0.8  # of the time to a first token: a step in flight is not broken off, and others may arrive
LEAST_SHARE = 0.1  # of a step's time that prefill is given where a target leaves none: a prompt always comes


@dataclasses.dataclass(frozen=True)
class LatencyGoals:
    """What prefill may cost the requests that decode, and when it has to be done.

    Attributes:
        max_slowdown: Time per token of running requests with prefill, over that without.
        tpot_s: Seconds per token of running requests, in place of `max_slowdown`; None: none are given.
        ttft_s: Seconds from a request's arrival to its first token. Prefill then takes what the requests that wait
            need for it, and no more. None: it takes all that it may.
    """

    max_slowdown: float = 8.0
    tpot_s: float | None = None
    ttft_s: float | None = None

    def allowed_s(self, decode_s: float) -> float:
        """Returns the mean seconds that prefill may add to a step of `decode_s` seconds."""
        if self.tpot_s is None:
            return SAFETY * (self.max_slowdown - 1) * decode_s
        return max(SAFETY * (self.tpot_s - decode_s), LEAST_SHARE * decode_s)

    def needed_s(self, decode_s: float, waiting: Iterable[tuple[float, float]]) -> float:
        """Returns the seconds of prefill a step with which all prompts keep `ttft_s`.

        `waiting` has, in the order in which prompts are computed, how long each has waited and what it takes, in
        seconds. A prompt has its first token once those in front of it and itself are computed: ``work`` seconds of
        prefill in the ``left`` seconds to its goal, of which steps take the rest to decode. Infinite where one is late.
        """
        assert self.ttft_s is not None
        work, needed = 0.0, LEAST_SHARE * decode_s
        for waited_s, prefill_s in waiting:
            work += prefill_s
            left = TTFT_SAFETY * self.ttft_s - waited_s
            if work >= left:
                return math.inf
            needed = max(needed, decode_s * work / (left - work))
        return needed


class PrefillBudget:
    """A budget of seconds that prefill may take from running requests.

    A step without prefill takes ``d`` seconds (a running median for each power of two of decode rows, as steps are
    padded); a prompt token in a step with decode rows takes ``c`` more (a running median). Every step with decode
    rows earns the seconds of credit that `LatencyGoals` allow beside ``d``, prefill spends ``c`` a token, and what a
    step really took is charged when it is known. So the mean time per token keeps the goal even where the shortest
    chunk takes longer than ``d``: it waits for a few steps, and then always comes. Credit is capped at what a step
    earns, or what the shortest chunk costs if that is more, so that an idle time buys no burst.

    How much prefill should take: prompts that arrive bring the same work whenever it is done. Held back, they wait, and
    fewer requests decode together; tokens are no faster in the mean, and from a load on the queue grows without end. So
    the default allows seven eighths of the time, which holds up to nearly the machine's capacity and still bounds what
    a flood of prompts does to a running request. Limiting prefill in steps with decode rows is Sarathi-Serve's
    (Agrawal et al., 2024); the budget is a token bucket.
    """

    def __init__(self, min_chunk: int, goals: LatencyGoals) -> None:
        self._min_chunk = min_chunk
        self.goals = goals
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

    def step_s(self, num_decode: int, num_prefill_tokens: int, num_steps: int = 1) -> float | None:
        """Returns the expected seconds of `num_steps` steps with these rows; None if unknown."""
        decode_s, token_s = self.decode_step_s(num_decode) if num_decode else 0.0, self.prefill_token_s
        if decode_s is None or (num_prefill_tokens and token_s is None):
            return None
        return num_steps * decode_s + num_prefill_tokens * (token_s or 0.0)

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

    def next_limit(self, num_decode: int, token_budget: int, waiting: Iterable[tuple[float, int]] = ()) -> int:
        """Returns the most prompt tokens of the next step, which earns its credit now.

        The step has `num_decode` decode rows. The result is at most `token_budget`. 0 means that this step decodes
        only: the credit is spent, or the pace is to be measured. Call the method once for each step. `waiting` has the
        seconds for which each prompt has waited, and its tokens that are not computed; it is read only if the goals
        have a time to first token.
        """
        if not num_decode:
            return token_budget
        bucket = self._bucket(num_decode)
        since_probe = self._since_probe.get(bucket, MEASURE_EVERY)
        if since_probe >= MEASURE_EVERY:
            self._since_probe[bucket] = 0
            self._refill(num_decode, ())
            return 0
        self._since_probe[bucket] = since_probe + 1
        token_s = self.prefill_token_s
        if self.decode_step_s(num_decode) is None or token_s is None:
            return min(self._min_chunk, token_budget)  # to learn from
        self._refill(num_decode, waiting)
        if token_s <= 0:
            return token_budget
        affordable = int(min(self._credit_s / token_s, token_budget) + 1e-9)
        return min(affordable, token_budget) if affordable >= self._min_chunk else 0

    def _refill(self, num_decode: int, waiting: Iterable[tuple[float, int]]) -> None:
        decode_s, token_s = self.decode_step_s(num_decode) or 0.0, self.prefill_token_s or 0.0
        earned = self.goals.allowed_s(decode_s)
        if self.goals.ttft_s is not None:
            prompts = ((waited_s, num_tokens * token_s) for waited_s, num_tokens in waiting)
            earned = min(earned, self.goals.needed_s(decode_s, prompts))
        self._credit_s = min(self._credit_s + earned, max(earned, self._min_chunk * token_s))

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
