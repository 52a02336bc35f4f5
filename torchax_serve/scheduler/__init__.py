"""Host side of the engine: requests, pages, and the plan of every step.

The package imports neither jax nor torch.
"""

from torchax_serve.scheduler.block_events import BlockEventLog, ClearedBlocks, RemovedBlocks, StoredBlocks
from torchax_serve.scheduler.config import CacheGroup, SchedulerConfig, SnapshotGroup
from torchax_serve.scheduler.host_pages import PageTransfer
from torchax_serve.scheduler.page_allocator import PageAllocator, SequencePages
from torchax_serve.scheduler.page_pool import NULL_PAGE, PageCopy, PagePool
from torchax_serve.scheduler.prefill_budget import LatencyGoals, PrefillBudget
from torchax_serve.scheduler.request import Request, RequestState, Status
from torchax_serve.scheduler.scheduler import INVALID_TOKEN, Scheduler
from torchax_serve.scheduler.speculative_config import SpeculativeConfig
from torchax_serve.scheduler.state_snapshots import StateRows
from torchax_serve.scheduler.step_plan import DecodeBatch, DraftResult, DraftRows, PlanRow, RowResult, StepPlan
from torchax_serve.scheduler.types import RequestId

__all__ = [
    "INVALID_TOKEN",
    "NULL_PAGE",
    "BlockEventLog",
    "CacheGroup",
    "ClearedBlocks",
    "DecodeBatch",
    "DraftResult",
    "DraftRows",
    "LatencyGoals",
    "PageAllocator",
    "PageCopy",
    "PagePool",
    "PageTransfer",
    "PlanRow",
    "PrefillBudget",
    "RemovedBlocks",
    "Request",
    "RequestId",
    "RequestState",
    "RowResult",
    "Scheduler",
    "SchedulerConfig",
    "SequencePages",
    "SnapshotGroup",
    "SpeculativeConfig",
    "StateRows",
    "Status",
    "StepPlan",
    "StoredBlocks",
]
