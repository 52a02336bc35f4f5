"""The host side of the engine: requests, pages, and the plan of every step. Imports neither jax nor torch."""

from torchax_serve.scheduler.config import CacheGroup, SchedulerConfig
from torchax_serve.scheduler.page_allocator import GroupUsage, PageAllocator, SequencePages
from torchax_serve.scheduler.page_pool import NULL_PAGE, PageCopy, PagePool
from torchax_serve.scheduler.prefill_budget import PrefillBudget
from torchax_serve.scheduler.request import RequestState, SchedulerRequest, Status
from torchax_serve.scheduler.scheduler import INVALID_TOKEN, Scheduler, SchedulerStats
from torchax_serve.scheduler.step_plan import DecodeBatch, PlanRow, RowResult, StepPlan
from torchax_serve.scheduler.types import FinishReason, RequestId

__all__ = [
    "INVALID_TOKEN",
    "NULL_PAGE",
    "CacheGroup",
    "DecodeBatch",
    "FinishReason",
    "GroupUsage",
    "PageAllocator",
    "PageCopy",
    "PagePool",
    "PlanRow",
    "PrefillBudget",
    "RequestId",
    "RequestState",
    "RowResult",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerRequest",
    "SchedulerStats",
    "SequencePages",
    "Status",
    "StepPlan",
]
