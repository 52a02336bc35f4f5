"""A request as the engine takes it: everything decided, nothing of it text."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING

from torchax_serve.request import SamplingParams
from torchax_serve.scheduling import Request, RequestId

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclasses.dataclass(frozen=True)
class RowRequest:
    """One prompt, one answer.

    Attributes:
        prompt_ids: checked token ids.
        config: limits and sampling, as merged with the model's own; without stop strings.
        params: what the caller asked, for options that only the engine knows.
        seed: draws depend on it and on the tokens, on nothing else.
    """

    prompt_ids: tuple[int, ...]
    config: GenerationConfig
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    seed: int = dataclasses.field(default_factory=lambda: secrets.randbits(63))

    @property
    def max_new_tokens(self) -> int:
        """How many tokens the answer may have."""
        if self.config.max_new_tokens is not None:
            return int(self.config.max_new_tokens)
        return max(1, int(self.config.max_length) - len(self.prompt_ids))

    @property
    def min_new_tokens(self) -> int:
        """How many tokens come before one may end the answer."""
        least = self.config.min_new_tokens
        if least is None:
            least = max(0, (self.config.min_length or 0) - len(self.prompt_ids))
        return min(int(least), self.max_new_tokens)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the answer."""
        eos = self.config.eos_token_id
        if eos is None:
            return frozenset()
        return frozenset([eos] if isinstance(eos, int) else [int(token) for token in eos])

    def to_scheduler(self, request_id: RequestId, now: float) -> Request:
        """What the scheduler has to know; `now` in seconds on its clock."""
        params = self.params
        return Request(
            request_id=request_id,
            prompt_ids=list(self.prompt_ids),
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_ids,
            min_new_tokens=self.min_new_tokens,
            priority=params.priority or 0,
            deadline_s=None if params.timeout_s is None else now + params.timeout_s,
            salt=params.cache_salt or "",
        )
