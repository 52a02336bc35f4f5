"""A step plan under construction."""

from __future__ import annotations

import dataclasses

from torchax_serve.scheduler.config import SchedulerConfig
from torchax_serve.scheduler.page_pool import PageCopy
from torchax_serve.scheduler.request import RequestState
from torchax_serve.scheduler.step_plan import PlanRow


@dataclasses.dataclass(slots=True)
class PlanBuilder:
    """Rows of a plan, and what they leave of its limits."""

    prefill_limit: int  # prompt tokens that this step may take
    outstanding: list[int]  # by group, pages that running requests still need for their prompts
    decode_rows: list[PlanRow] = dataclasses.field(default_factory=list)
    decoding: list[RequestState] = dataclasses.field(default_factory=list)
    prefill_rows: list[PlanRow] = dataclasses.field(default_factory=list)
    prefilling: list[RequestState] = dataclasses.field(default_factory=list)
    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    fresh_slots: list[int] = dataclasses.field(default_factory=list)
    prefill_left: int = 0  # of the limit

    def __post_init__(self) -> None:
        self.prefill_left = self.prefill_limit

    def wanted_chunk(self, config: SchedulerConfig, missing: int) -> int:
        """Returns how many of a prompt's `missing` tokens the step is to compute if there are pages.

        Where only some lengths exist, no prompt is cut into shorter ones for what others leave of a step: each chunk
        reads all weights, and equal ones share a program.
        """
        if not self.prefill_left or (self.prefill_rows and not config.batches_prefill):
            return 0
        wanted, most = (config.chunk_len(min(limit, missing)) for limit in (self.prefill_left, self.prefill_limit))
        return wanted if config.allowed_chunk_sizes is None or wanted == most else 0
