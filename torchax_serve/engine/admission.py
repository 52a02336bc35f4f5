"""Admission of requests to an engine: how many it takes, and whether it still takes any."""

from __future__ import annotations

from collections.abc import Sequence

from model_adapters.errors import QueueFullError, QueueTokensError, TorchaxServeError
from torchax_serve.scheduler import Scheduler

MAX_NUM_WAITING = 8192
"""Default limit of the requests that wait for a slot."""

MAX_NUM_WAITING_TOKENS = 1 << 22
"""Default limit of the tokens of waiting prompts; as Python numbers they take about 150 MB."""

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
        max_num_waiting_tokens: Tokens of their prompts together.

    Attributes:
        num_entering: Requests that were taken and that the engine's thread has not seen yet.
        num_entering_tokens: Tokens of their prompts.
        refusal: Error of every request, while none are taken; None: they are.
        max_num_seqs, max_num_waiting, max_num_waiting_tokens: As given.
    """

    def __init__(
        self, max_num_seqs: int, max_num_waiting: int, max_num_waiting_tokens: int = MAX_NUM_WAITING_TOKENS
    ) -> None:
        self.num_entering = self.num_entering_tokens = 0
        self.refusal: str | None = None
        self.max_num_waiting, self.max_num_waiting_tokens = max_num_waiting, max_num_waiting_tokens
        self.max_num_seqs = max_num_seqs
        self._most = max_num_seqs + max_num_waiting

    def admit(
        self,
        prompt_lens: Sequence[int],
        scheduler: Scheduler,
        close_reason: str | None,
        *,
        is_continuation: bool = False,
    ) -> None:
        """Takes requests, all or none, which the engine's thread then enters; see `entered`.

        Args:
            prompt_lens: Tokens of the prompt of each; answers to one prompt are requests of their own.
            scheduler: The scheduler, which has the requests that have entered and not ended.
            close_reason: Why the engine is closed; None while it is open.
            is_continuation: Whether they go on with a call that was taken before: its work would be lost if they were
                refused, and there are no more of such calls than were taken.

        Raises:
            QueueFullError: too many requests would wait.
            QueueTokensError: too many tokens of prompts would wait.
            TorchaxServeError: no more requests are taken.
        """
        if close_reason is not None:
            raise TorchaxServeError(f"expected an open model, this one is closed ({close_reason}); call serve() again")
        if self.refusal is not None:
            raise TorchaxServeError(self.refusal)
        num_open, num_new = len(scheduler) + self.num_entering, len(prompt_lens)
        if num_open + num_new > self._most and not is_continuation:
            raise QueueFullError(
                f"expected at most {self._most} requests at a time, {self.max_num_waiting} of them waiting, got "
                f"{num_new} next to {num_open}; ask again later, or raise EngineOptions(max_num_waiting=...)"
            )
        num_new_tokens = sum(prompt_lens[max(0, self.max_num_seqs - num_open) :])  # the first ones find a free slot
        # Prompts that have just come count until the engine's thread has given them their slots.
        num_waiting_tokens = scheduler.num_waiting_tokens + self.num_entering_tokens
        exceeds = num_new_tokens and num_waiting_tokens + num_new_tokens > self.max_num_waiting_tokens
        if exceeds and not is_continuation:
            raise QueueTokensError(
                f"expected at most {self.max_num_waiting_tokens} tokens of prompts that wait, got {num_new_tokens} "
                f"next to {num_waiting_tokens}; ask again later, or raise EngineOptions(max_num_waiting_tokens=...)"
            )
        self.num_entering += num_new
        self.num_entering_tokens += sum(prompt_lens)

    def entered(self, prompt_lens: Sequence[int]) -> None:
        """Counts requests that the scheduler has got, or that have ended before."""
        self.num_entering -= len(prompt_lens)
        self.num_entering_tokens -= sum(prompt_lens)
