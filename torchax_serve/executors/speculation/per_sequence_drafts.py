"""Verify steps of the per-sequence executor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from model_adapters.caches.packed_batch import PackedBatch, PagedLayout
from model_adapters.device_arrays import to_device
from torchax_serve.buckets import bucket_for
from torchax_serve.compilation.background import CompileTask, abstract
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.executors.base import MakeBitmask
from torchax_serve.executors.per_sequence.blocks import BlockForward
from torchax_serve.executors.per_sequence.buckets import PerSequenceBuckets
from torchax_serve.executors.slot_adapters import SlotAdapters
from torchax_serve.executors.speculation.draft_head import DraftHead
from torchax_serve.executors.speculation.draft_model import DraftModel
from torchax_serve.executors.speculation.pending_tokens import (
    Constrained,
    PendingForward,
    PendingSizes,
    PendingTokens,
    SequenceMemory,
)
from torchax_serve.executors.speculation.speculative_decode import SpeculativeDecoder
from torchax_serve.executors.speculation.verified_tokens import VerifiedTokens
from torchax_serve.executors.step_inputs import PackedStepSpec
from torchax_serve.kv_cache.cache_layout import CacheLayout
from torchax_serve.kv_cache.slot_states import PagedCacheWithStates
from torchax_serve.sampling.sampler import Sampler, default_sharding
from torchax_serve.scheduler import SpeculativeConfig, StepPlan


@dataclasses.dataclass(frozen=True)
class SequenceDraftSpecs:
    """The `DraftSpecs` of a per-sequence executor; a dispatch is one step.

    Attributes:
        num_slots: Maximum number of rows of a step.
        max_len: Most tokens of a row.
        page_size: Tokens of a page.
        decode_buckets: Numbers of rows, ascending.
        page_buckets: Numbers of pages of a row, ascending; 0: nothing is stored in pages.
        sizes: Numbers of pending tokens.
        head: Names the draft head that follows each step; empty: there is none.
    """

    num_slots: int
    max_len: int
    page_size: int
    decode_buckets: tuple[int, ...]
    page_buckets: tuple[int, ...]
    sizes: PendingSizes
    head: str = ""
    max_num_steps: int = 1

    @property
    def draft_ends(self) -> tuple[int, ...]:
        """Implements `DraftSpecs.draft_ends`: pages are gathered."""
        return tuple(num_pages * self.page_size for num_pages in self.page_buckets)

    def num_pages(self, num_rows: int, end: int) -> int:
        """Returns the pages of a row that are gathered, with room for the padding of a step."""
        if not self.page_buckets[-1]:
            return 0
        room = -(-self.sizes.width(num_rows) // self.page_size)
        return bucket_for(self.page_buckets, -(-end // self.page_size)) + room

    def of_drafts(self, num_rows: int, num_tokens: int, end: int) -> PackedStepSpec:
        """Implements `DraftSpecs.of_drafts`."""
        layout = PagedLayout(groups=(0,), windows=(None,), max_len=self.max_len, all_logits=True)
        num_pages = self.num_pages(num_rows, end)
        return PackedStepSpec(num_tokens, num_rows, num_pages, layout, batch_invariant=False, head=self.head)


@dataclasses.dataclass(frozen=True)
class CatchUpSpec:
    """Static arguments of a catch-up."""

    num_rows: int
    num_pages: int


class SequenceDrafts:
    """Runs plans with drafts on a per-sequence executor's cache, and catches up behind them.

    Args:
        config: Options of speculation.
        forward: Forward of one request.
        layout: Layout of its cache.
        block_len: Most tokens of one forward.
        weights: Weights by name, or those of model and head.
        cache: Page pools and states, replaced by each step.
        executables: Cache of compiled steps.
        compiled: Makes a cached function of the model.
        shapes: Sizes of the executor's steps.
        constrained: Constrains pools and states to the cache's sharding.
        num_slots: Maximum number of rows of a step.
        adapters: The adapter of each slot.
        draft: Model or head that drafts; None: drafts are looked up.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        forward: BlockForward,
        layout: CacheLayout,
        block_len: int,
        weights: Any,
        cache: PagedCacheWithStates,
        executables: ExecutableCache,
        compiled: Callable[..., CachedFunction],
        shapes: PerSequenceBuckets,
        *,
        constrained: Constrained,
        num_slots: int,
        adapters: SlotAdapters,
        draft: DraftModel | DraftHead | None,
    ) -> None:
        sizes = PendingSizes(config.num_speculative_tokens, layout.has_states, block_len)
        self._forward = PendingForward(forward, layout, sizes, num_slots, constrained)
        self._weights, self._cache, self._sizes = weights, cache, sizes
        self._head = draft if isinstance(draft, DraftHead) else None
        self._num_pools = len(layout.pages)  # behind these is the head's
        self._num_slots, self._adapters = num_slots, adapters
        self._specs = SequenceDraftSpecs(
            num_slots,
            cache.plan.max_len,
            cache.plan.page_size,
            shapes.row_buckets,
            shapes.page_buckets,
            sizes,
            "" if self._head is None else self._head.identity,
        )
        self._width = max(map(sizes.width, shapes.row_buckets))
        self._pending = self._nothing(default_sharding())
        self._behind: set[int] = set()  # slots that may have pending tokens
        self._decoder = SpeculativeDecoder(
            config,
            self._verify,
            weights,
            executables,
            compiled,
            self._specs,
            pools=lambda: (self._memory, *cache.pools[self._num_pools :]),
            adapters=adapters,
            draft=draft,
        )
        self._catch_up = compiled("catch_up", self._caught_up, donate={"memory": None})

    @property
    def num_programs(self) -> int:
        """Compiled steps."""
        return self._decoder.num_programs + self._catch_up.num_programs

    @property
    def _memory(self) -> SequenceMemory:
        return SequenceMemory(self._cache.pools[: self._num_pools], self._cache.states, self._pending)

    def _keep(self, memory: SequenceMemory, of_head: Sequence[Any]) -> None:
        pools, self._cache.states, self._pending = memory
        self._cache.pools = (*pools, *of_head)

    def _nothing(self, sharding: Any, lens: np.ndarray | None = None) -> PendingTokens:
        lens = np.zeros(self._num_slots + 1, np.int32) if lens is None else lens
        ids = np.zeros((self._num_slots + 1, self._width), np.int32)
        placed: Any = jax.device_put((lens, ids), sharding)
        return PendingTokens(*placed)

    def run(self, plan: StepPlan, sampler: Sampler, make_bitmask: MakeBitmask | None) -> VerifiedTokens:
        """Dispatches the step of a plan with drafts; as `Executor.run_decode`."""
        drafts = plan.drafts
        assert drafts is not None
        if drafts.histories is not None:  # the first one behind other steps
            self.catch_up(plan.page_tables)
            lens = np.zeros(self._num_slots + 1, np.int32)
            lens[[row.slot for row in plan.rows]] = [len(tokens) - 1 for tokens in drafts.histories]
            self._pending = self._nothing(sampler.last_tokens.sharding, lens)
        if self._sizes.has_states:  # a row that may be at its end is left out of a plan, and may come back
            self._behind |= {row.slot for row in plan.rows}
        ran: tuple[Any, tuple[Any, ...]] = self._decoder.run(plan, sampler)
        results, (memory, *of_head) = ran
        self._keep(memory, of_head)
        return self._decoder.sample(plan, sampler, results, make_bitmask)

    def catch_up(self, tables: Sequence[np.ndarray]) -> None:
        """Moves states to the ends of their texts, in front of a step without drafts.

        Args:
            tables: Page tables by group, int32[num_slots, pages_per_seq].
        """
        slots, self._behind = sorted(self._behind), set()
        history = self._decoder.history
        if not slots or history is None or history.lens.is_deleted() or self._pending.lens.is_deleted():
            return
        num_rows = bucket_for(self._specs.decode_buckets, len(slots))
        spec = CatchUpSpec(num_rows, self._specs.num_pages(1, self._specs.max_len))
        numbers = np.zeros(self._size(spec), np.int32)
        by_row = numbers.reshape(num_rows, -1)
        by_row[: len(slots), 0], by_row[: len(slots), 1] = slots, 1
        if spec.num_pages:
            table = tables[0][slots, : spec.num_pages]
            by_row[: len(slots), 2 : 2 + table.shape[1]] = table
        given = to_device(self._adapters.append_to(numbers), np.int32)
        of_head = self._cache.pools[self._num_pools :]
        self._keep(self._catch_up(self._weights, self._memory, history.lens, given, spec=spec), of_head)

    def _size(self, spec: CatchUpSpec) -> int:
        return spec.num_rows * (2 + spec.num_pages)

    def _caught_up(
        self, weights: Any, memory: SequenceMemory, lens: jax.Array, numbers: jax.Array, spec: CatchUpSpec
    ) -> SequenceMemory:
        """Catches up; `numbers` has the slot, whether it is used, and the pages of each row."""
        by_row = numbers[: self._size(spec)].reshape(spec.num_rows, -1)
        slots = by_row[:, 0]
        adapters = self._adapters.of_rows(numbers, slots)
        ends = jax.numpy.where(by_row[:, 1] > 0, lens[slots] - 1, 0)
        weights = weights if self._head is None else weights.model
        return self._forward.catch_up(weights, memory, slots, ends, by_row[:, 2:], adapters)

    def _verify(
        self, weights: Any, pools: tuple[Any, ...], batch: PackedBatch, spec: PackedStepSpec
    ) -> tuple[jax.Array, tuple[Any, ...], jax.Array | None]:
        memory, *of_head = pools
        if self._head is None:
            logits, memory, _ = self._forward.verify(weights, memory, batch, spec)
            return logits, (memory,), None
        logits, memory, hidden = self._forward.verify(weights.model, memory, batch, spec)
        assert hidden is not None
        own = self._head.follow(weights, tuple(of_head), batch, hidden, spec.layout)
        return logits, (memory, *own), hidden

    def temporary_bytes(self) -> int:
        """Returns the temporary bytes of the largest step."""
        return self._decoder.temporary_bytes()

    def compile_tasks(self) -> Iterator[CompileTask]:
        """Yields every program that traffic can meet."""
        yield from self._decoder.compile_tasks()
        for num_rows in self._specs.decode_buckets if self._sizes.has_states else ():
            spec = CatchUpSpec(num_rows, self._specs.num_pages(1, self._specs.max_len))
            numbers = to_device(self._adapters.empty(self._size(spec)), np.int32)
            lens = to_device(np.zeros(self._num_slots), np.int32)
            args = abstract((self._memory, lens, numbers))
            yield CompileTask(spec, functools.partial(self._catch_up.compiled, self._weights, *args, spec=spec))
