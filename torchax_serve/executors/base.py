"""What the two roads of the engine share: sizes, memory, and the result of choosing one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from torchax_serve.kv_cache.pools import PagedCache

if TYPE_CHECKING:
    from torchax_serve.executors.packed import PackedExecutor
    from torchax_serve.executors.per_sequence import PerSequenceExecutor


@dataclasses.dataclass(frozen=True)
class Executor:
    """How a model is run: packed, or each request by itself on what is gathered from its pages."""

    model: PackedExecutor | PerSequenceExecutor
    cache: PagedCache
    fallback_reason: str | None = None  # None: it is packed
    allowed_chunk_sizes: tuple[int, ...] | None = None  # of prompts; None: any
    can_share_prefixes: bool = True
    sampler_table_bytes: int = 0  # that the sampler takes beside the cache
    num_slots: int | None = None  # that memory is for; None: as many as were asked for

    @property
    def name(self) -> str:
        """``packed`` or ``gathered``."""
        return "packed" if self.fallback_reason is None else "gathered"

    def __str__(self) -> str:
        """A line for people."""
        plan = self.cache.plan
        if plan.groups:
            pages = " + ".join(str(group.num_pages - 1) for group in plan.groups)
            in_int8 = " in int8" if any(shape.dtype == np.int8 for shape in plan.shapes) else ""
            at_once = plan.num_full_length_requests(plan.max_len)
            fit = "1 request fits" if at_once == 1 else f"{at_once} requests fit"
            said = (
                f"cache of {plan.num_bytes / 1e6:.1f} MB{in_int8}: {pages} pages of {plan.page_size} tokens, room for "
                f"{plan.num_tokens} tokens; {fit} at once, each of up to {plan.max_len} tokens"
            )
        else:
            said = f"no pages: each request has a state of one size; requests of at most {plan.max_len} tokens"
        said += f"; {self.sampler_table_bytes / 1e6:.1f} MB for the sampler's tables"
        if self.cache.state_bytes:
            said += f"; {self.cache.state_bytes / 1e6:.1f} MB for the states of requests"
        return said if self.fallback_reason is None else f"{said}; gathered, not packed: {self.fallback_reason}"
