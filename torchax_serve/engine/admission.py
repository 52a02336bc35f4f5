"""Admission of requests to an engine: how many it takes, and whether it still takes any."""

from __future__ import annotations

from model_adapters.errors import QueueFullError, TorchaxServeError

DRAINED = (
    "expected an engine that takes requests, this one finishes those that it has (drain() was called); send the "
    "request to another one"
)
"""Error of a request to an engine that drains."""

ASLEEP = "expected a model that is awake, this one has given the memory of its cache away (sleep()); call wake() first"
"""Error of a request to an engine without a cache."""


class Admission:
    """Decides whether an engine takes further requests; used under the engine's lock.

    Args:
        max_num_seqs: Requests that run at once.
        max_num_waiting: Requests that may wait for a slot.

    Attributes:
        num_entering: Requests that were taken and that the engine's thread has not seen yet.
        refusal: Error of every request, while none are taken; None: they are.
    """

    def __init__(self, max_num_seqs: int, max_num_waiting: int) -> None:
        self.num_entering = 0
        self.refusal: str | None = None
        self.max_num_waiting = max_num_waiting
        self._most = max_num_seqs + max_num_waiting

    def check(self, num_new: int, num_live: int, close_reason: str | None) -> None:
        """Checks that `num_new` requests may enter next to the `num_live` ones that have entered and not ended.

        `close_reason` says why the engine is closed, if it is.

        Raises:
            QueueFullError: too many requests would wait.
            TorchaxServeError: no more requests are taken.
        """
        if close_reason is not None:
            raise TorchaxServeError(f"expected an open model, this one is closed ({close_reason}); call serve() again")
        if self.refusal is not None:
            raise TorchaxServeError(self.refusal)
        num_open = num_live + self.num_entering
        if num_open + num_new > self._most:
            raise QueueFullError(
                f"expected at most {self._most} requests at a time, {self.max_num_waiting} of them waiting, got "
                f"{num_new} next to {num_open}; ask again later, or raise EngineOptions(max_num_waiting=...)"
            )
