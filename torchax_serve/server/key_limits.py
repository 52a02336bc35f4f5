"""Limits of API keys: requests and tokens a minute, requests at once, models."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.answers import Answer
from torchax_serve.server.errors import ApiError

MINUTE_S = 60.0


@dataclasses.dataclass(frozen=True)
class KeyLimits:
    """Limits of one key; None and the empty tuple set none.

    Attributes:
        requests_per_minute: Requests a minute.
        tokens_per_minute: Tokens a minute, those of prompts and answers together.
        max_concurrency: Requests that are answered at once.
        models: Names of models that requests may use.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    models: tuple[str, ...] = ()

    @classmethod
    def parse(cls, key_name: str, words: Iterable[str]) -> KeyLimits:
        """Returns the limits in words such as ``tokens_per_minute=60000`` and ``models=a,b``.

        Raises:
            InvalidArgumentError: a limit is unknown, or is no positive number.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        found: dict[str, int | tuple[str, ...]] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name not in known or name in found:
                raise InvalidArgumentError(
                    f"API key {key_name!r}: expected limits NAME=VALUE, each once, of {', '.join(known)}, got {name!r}"
                )
            if name == "models":
                found[name] = tuple(filter(None, value.split(",")))
            elif value.isascii() and value.isdigit() and int(value) > 0:
                found[name] = int(value)
            else:
                raise InvalidArgumentError(f"API key {key_name!r}: {name}: expected a number > 0, got {value!r}")
        return cls(**found)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class ApiKey:
    """A key's name and limits.

    Attributes:
        name: For the log.
        limits: Its limits.
        owner: Whose what it stores is: the same after a restart.
    """

    name: str
    limits: KeyLimits = KeyLimits()
    owner: str = ""

    def allows(self, model_name: str) -> bool:
        """Returns whether requests with the key may use a model."""
        return not self.limits.models or model_name in self.limits.models


class TokenBucket:
    """Allowance of so many units a minute, which fills up steadily to one minute's worth.

    Args:
        per_minute: Units a minute.
        clock: Seconds, monotonic.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock, self._level, self._filled_s = clock, float(per_minute), clock()

    def level(self) -> float:
        """Returns the units that are left; negative if more were taken than there were."""
        now = self._clock()
        added = (now - self._filled_s) * self.per_minute / MINUTE_S
        self._level, self._filled_s = min(float(self.per_minute), self._level + added), now
        return self._level

    def take(self, units: int) -> None:
        """Takes units, also more than are left."""
        self._level = self.level() - units

    def seconds_until(self, units: float) -> float:
        """Returns the seconds until so many units are left, if none are taken meanwhile."""
        return max(0.0, (units - self.level()) * MINUTE_S / self.per_minute)


class KeyUsage:
    """Requests and tokens of one key, against its limits.

    All calls come from the event loop's thread.
    """

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        given = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self._buckets = {kind: TokenBucket(most, clock) for kind, most in given.items() if most is not None}
        self._num_running = 0

    def begin(self) -> None:
        """Counts a request that begins.

        Raises:
            ApiError: 429, with the seconds after which it may be sent again.
        """
        if self.limits.max_concurrency is not None and self._num_running >= self.limits.max_concurrency:
            raise _too_many(f"expected at most {self.limits.max_concurrency} requests of this key at once", 1.0)
        for kind, bucket in self._buckets.items():
            if bucket.level() < 1:
                text = f"expected at most {bucket.per_minute} {kind} a minute of this key"
                raise _too_many(text, bucket.seconds_until(1))
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)
        self._num_running += 1

    def end(self) -> None:
        """Counts a request that has ended."""
        self._num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """Takes tokens of a request from the minute's allowance."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(num_tokens)

    def follow(self, answers: Iterable[Answer]) -> None:
        """Charges the prompts of `answers` now, and their tokens as they come."""
        answers = list(answers)
        self.charge(sum(len(answer.prompt_ids) for answer in answers))
        for answer in answers:
            answer.on_tokens = self.charge

    def headers(self) -> Mapping[str, str]:
        """Returns the headers ``x-ratelimit-*`` of a response."""
        found = {}
        for kind, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level())))
            found[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return found


class KeyUsages:
    """The usage of each key that has limits."""

    def __init__(self) -> None:
        self._by_name: dict[str, KeyUsage] = {}

    def of(self, key: ApiKey | None) -> KeyUsage | None:
        """Returns the usage of `key`; None without limits. Changed limits begin anew."""
        if key is None or key.limits == KeyLimits():
            return None
        usage = self._by_name.get(key.name)
        if usage is None or usage.limits != key.limits:
            usage = self._by_name[key.name] = KeyUsage(key.limits)
        return usage


def _too_many(message: str, wait_s: float) -> ApiError:
    headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return ApiError(429, f"{message}; send it again later", headers=headers)
