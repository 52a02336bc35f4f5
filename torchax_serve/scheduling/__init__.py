"""The host side of the engine: requests, pages, and the plan of every step. Imports neither jax nor torch."""

from torchax_serve.scheduling.cache_book import GroupUsage, PagedCacheBook, SequencePages
from torchax_serve.scheduling.config import CacheGroup, SchedulerConfig
from torchax_serve.scheduling.pacer import PrefillPacer
from torchax_serve.scheduling.pages import NULL_PAGE, PagePool
from torchax_serve.scheduling.plan import DecodeRows, Outcome, PageCopy, PlanRow, StepPlan
from torchax_serve.scheduling.request import FinishReason, Request, RequestId, RequestState, Status
from torchax_serve.scheduling.scheduler import INVALID_TOKEN, Scheduler, SchedulerStats

__all__ = [
    "INVALID_TOKEN",
    "NULL_PAGE",
    "CacheGroup",
    "DecodeRows",
    "FinishReason",
    "GroupUsage",
    "Outcome",
    "PageCopy",
    "PagePool",
    "PagedCacheBook",
    "PlanRow",
    "PrefillPacer",
    "Request",
    "RequestId",
    "RequestState",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SequencePages",
    "Status",
    "StepPlan",
]
