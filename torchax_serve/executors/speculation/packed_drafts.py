"""Verify steps of the packed executor, also of models with recurrent layers.

A recurrent state behind drafts that are rejected cannot be taken back. So a verify step keeps the states behind the
last token that is known, and drops those behind its drafts. Drafts that it accepts are *pending* then: keys and values
have them, states do not. The next step computes them again, in front of its own tokens. Where a step waits for the
weights, a few tokens more cost little. A step without drafts needs the states at the end of each text:
`PackedDrafts.catch_up` computes pending tokens alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import PackedBatch, Pool
from model_adapters.device_arrays import to_device
from model_adapters.ops.searchsorted import num_at_most
from torchax_serve.buckets import bucket_for
from torchax_serve.compilation.background import CompileTask, abstract
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.executors.base import MakeBitmask
from torchax_serve.executors.packed.specs import PackedSpecs
from torchax_serve.executors.slot_adapters import SlotAdapters
from torchax_serve.executors.speculation.draft_head import DraftHead
from torchax_serve.executors.speculation.draft_model import DraftModel
from torchax_serve.executors.speculation.pending_tokens import PendingTokens
from torchax_serve.executors.speculation.speculative_decode import Forward, SpeculativeDecoder
from torchax_serve.executors.speculation.verified_tokens import VerifiedTokens
from torchax_serve.executors.step_inputs import PackedStepSpec
from torchax_serve.kv_cache.pools import PagedCache
from torchax_serve.sampling.sampler import Sampler, default_sharding
from torchax_serve.scheduler import SpeculativeConfig, StepPlan


class PackedDrafts:
    """Runs plans with drafts on the cache of a packed executor.

    Args:
        config: Options of speculation.
        forward: Forward of a packed step, and of the draft head behind it.
        weights: Weights by name, or those of model and head.
        cache: Pools, replaced by each step.
        executables: Cache of compiled steps.
        compiled: Makes a cached function of the model.
        specs: Sizes of the executor's steps.
        forward_model: The same of the model alone, which returns the hidden states of some layers, too.
        constrain_pools: Constrains pools to the shardings that programs take them with.
        adapters: The adapter of each slot.
        draft: Model or head that drafts; None: drafts are looked up.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        forward: Forward,
        weights: Any,
        cache: PagedCache,
        executables: ExecutableCache,
        compiled: Callable[..., CachedFunction],
        specs: PackedSpecs,
        forward_model: Callable[..., Any],
        constrain_pools: Callable[[tuple[Any, ...]], tuple[Any, ...]],
        *,
        adapters: SlotAdapters,
        draft: DraftModel | DraftHead | None,
    ) -> None:
        self._forward, self._weights, self._cache, self._specs = forward, weights, cache, specs
        self._forward_model, self._head = forward_model, draft if isinstance(draft, DraftHead) else None
        self._adapters, self._num_drafts = adapters, config.num_speculative_tokens
        self._pending: PendingTokens | None = None
        if cache.layout.has_states:
            self._pending = self._nothing(default_sharding())
        self._pending_slots: set[int] = set()  # slots that may have pending tokens
        self._decoder = SpeculativeDecoder(
            config,
            self._verify,
            weights,
            executables,
            compiled,
            specs,
            pools=self._pools,
            adapters=adapters,
            draft=draft,
            constrain_pools=functools.partial(_constrain_pools, constrain_pools),
        )
        self._catch_up = compiled("catch_up_packed", self._caught_up, donate={"pools": 1})

    @property
    def num_programs(self) -> int:
        """Compiled steps."""
        return self._decoder.num_programs + self._catch_up.num_programs

    def _pools(self) -> tuple[Any, ...]:
        """Returns the pools, and in front of them pending tokens of a model with recurrent states."""
        return self._cache.pools if self._pending is None else (self._pending, *self._cache.pools)

    def _keep(self, pools: tuple[Any, ...]) -> None:
        if self._pending is not None:
            self._pending, *pools = pools  # type: ignore[assignment]
        self._cache.pools = tuple(pools)

    def _nothing(self, sharding: Any, lens: np.ndarray | None = None) -> PendingTokens:
        num_rows = self._specs.num_slots + 1
        lens = np.zeros(num_rows, np.int32) if lens is None else lens
        placed: Any = jax.device_put((lens, np.zeros((num_rows, self._num_drafts), np.int32)), sharding)
        return PendingTokens(*placed)

    def run(self, plan: StepPlan, sampler: Sampler, make_bitmask: MakeBitmask | None) -> VerifiedTokens:
        """Dispatches the steps of a plan with drafts; as `Executor.run_decode`."""
        drafts = plan.drafts
        assert drafts is not None
        if self._pending is not None:
            if drafts.histories is not None:  # the first one behind other steps
                self.catch_up(plan.page_tables)
                lens = np.zeros(self._specs.num_slots + 1, np.int32)
                lens[[row.slot for row in plan.rows]] = [len(tokens) - 1 for tokens in drafts.histories]
                self._pending = self._nothing(sampler.last_tokens.sharding, lens)
            self._pending_slots |= {row.slot for row in plan.rows}
        results, pools = self._decoder.run(plan, sampler)
        self._keep(pools)
        return self._decoder.sample(plan, sampler, results, make_bitmask)

    def assign(self, slot: int) -> None:
        """Forgets the pending tokens of a slot that another request gets."""
        self._pending_slots.discard(slot)

    def catch_up(self, tables: Sequence[np.ndarray]) -> None:
        """Moves states to the ends of their texts, in front of a step without drafts.

        Args:
            tables: Page tables by group, int32[num_slots, pages_per_seq].
        """
        slots, history, pending = sorted(self._pending_slots), self._decoder.history, self._pending
        if not slots or pending is None or history is None or history.lens.is_deleted() or pending.lens.is_deleted():
            self._pending_slots = set()
            return
        spec = self._catch_up_spec(bucket_for(self._specs.decode_buckets, len(slots)))
        numbers = np.zeros((2 + spec.num_tables * spec.pages_per_seq) * spec.num_rows, np.int32)
        by_row = numbers.reshape(-1, spec.num_rows)
        by_row[0, : len(slots)], by_row[1, : len(slots)] = slots, 1
        for table, part in zip(tables, np.split(by_row[2:], max(spec.num_tables, 1)), strict=False):
            part.reshape(spec.num_rows, -1)[: len(slots)] = table[slots]
        given = to_device(self._adapters.append_to(numbers), np.int32)
        self._keep(self._catch_up(self._weights, self._pools(), history.lens, given, spec=spec)[1])
        self._pending_slots = set()  # not before: a step that fails to compile leaves the cache as it is

    def _catch_up_spec(self, num_rows: int) -> PackedStepSpec:
        spec = self._specs.of_drafts(num_rows, num_rows * self._num_drafts, self._specs.max_len)
        return dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, all_logits=False))

    def _caught_up(
        self, weights: Any, pools: tuple[Any, ...], lens: jax.Array, numbers: jax.Array, spec: PackedStepSpec
    ) -> tuple[None, tuple[Any, ...]]:
        """Computes pending tokens; `numbers` has slot, use and pages of each row."""
        pending, *pools = pools  # type: ignore[assignment]
        size = (2 + spec.num_tables * spec.pages_per_seq) * spec.num_rows
        by_row = numbers[:size].reshape(-1, spec.num_rows)
        slots, first = by_row[0], jnp.where(by_row[1] > 0, lens[by_row[0]] - 1, 0)
        tables = jnp.split(by_row[2:], spec.num_tables) if spec.num_tables else []
        text = PendingRows.of(pending, slots, first, jnp.zeros_like(first), spec.num_tokens)
        batch = text.batch(
            text.pending_ids(),
            tuple(table.reshape(spec.num_rows, -1) for table in tables),
            self._adapters.of_rows(numbers, slots),
            text.num_pending,
            has_rope_lens=spec.has_rope_lens,
        )
        _, pools, _ = self._of_model(weights, tuple(pools), batch, spec)
        return None, (text.kept(first, pending.ids[slots]), *pools)

    def _of_model(
        self, weights: Any, pools: tuple[Any, ...], batch: PackedBatch, spec: PackedStepSpec
    ) -> tuple[jax.Array, tuple[Any, ...], jax.Array | None]:
        """Runs the model and not its head, whose pool and state stand behind those of the model."""
        if self._head is None:
            result: Any = self._forward_model(weights, pools, batch, spec, ())
            return result
        num_own = self._head.loaded.num_pools
        spec = dataclasses.replace(spec, layout=spec.layout.without_last(num_own))
        of_model, own = pools[: -1 - num_own], pools[-1 - num_own :]
        logits, after, hidden = self._forward_model(weights.model, of_model, batch, spec, self._head.loaded.layers)
        return logits, (*after, *own), hidden

    def _verify(
        self, weights: Any, pools: tuple[Any, ...], batch: PackedBatch, spec: PackedStepSpec
    ) -> tuple[jax.Array, tuple[Pool, ...], jax.Array | None]:
        """Computes logits float[T, vocab] of a verify step, behind the pending tokens of its rows."""
        if not isinstance(pools[0], PendingTokens):
            return self._forward(weights, pools, batch, spec)
        pending, *pools = pools  # type: ignore[assignment]
        assert batch.slots is not None
        num_drafts, counts = pending.ids.shape[1], jnp.diff(batch.cu_q_lens)
        num_tokens = spec.num_tokens + spec.num_rows * num_drafts
        text = PendingRows.of(pending, batch.slots, batch.kv_lens - counts, counts, num_tokens)
        new = batch.cu_q_lens[text.rows] + text.offsets - text.num_pending[text.rows]
        new_ids = batch.token_ids[jnp.clip(new, 0, spec.num_tokens - 1)]
        starts = jnp.minimum(batch.cu_q_lens[:-1], spec.num_tokens - 1)
        wide = text.batch(
            jnp.where(text.offsets < text.num_pending[text.rows], text.pending_ids(), new_ids),
            batch.page_tables,
            None if batch.adapters is None else batch.adapters[starts],
            text.num_pending + 1,
            has_rope_lens=batch.rope_lens is not None,
        )
        # The model's head reads the new tokens alone.
        token = jnp.arange(spec.num_tokens, dtype=jnp.int32)
        row = jnp.minimum(num_at_most(batch.cu_q_lens[1:], token), spec.num_rows - 1)
        place = text.cu[row] + text.num_pending[row] + token - batch.cu_q_lens[row]
        place = jnp.clip(place, 0, num_tokens - 1)
        wide = dataclasses.replace(wide, last=place)
        layout = dataclasses.replace(spec.layout, all_logits=False)
        wide_spec = dataclasses.replace(spec, num_tokens=num_tokens, layout=layout)
        logits, after, hidden = self._of_model(weights, tuple(pools), wide, wide_spec)
        if self._head is not None:
            assert hidden is not None
            hidden = hidden[place]
            after = (*after[:-2], *self._head.follow(weights, after[-2:], batch, hidden, spec.layout))
        drafts = starts[:, None] + 1 + jnp.arange(num_drafts, dtype=jnp.int32)
        ids = batch.token_ids[jnp.minimum(drafts, spec.num_tokens - 1)]
        kept: Any = text.kept(text.first + 1, ids)
        return logits, (kept, *after), hidden

    def temporary_bytes(self) -> int:
        """Returns the temporary bytes of the largest step."""
        return self._decoder.temporary_bytes()

    def compile_tasks(self) -> Iterator[CompileTask]:
        """Yields every program that traffic can meet."""
        yield from self._decoder.compile_tasks()
        for num_rows in self._specs.decode_buckets if self._pending is not None else ():
            spec = self._catch_up_spec(num_rows)
            size = (2 + spec.num_tables * spec.pages_per_seq) * num_rows
            numbers = to_device(self._adapters.empty(size), np.int32)
            lens = to_device(np.zeros(self._specs.num_slots), np.int32)
            args = abstract((self._pools(), lens, numbers))
            yield CompileTask(spec, functools.partial(self._catch_up.compiled, self._weights, *args, spec=spec))

    def largest(self, abstract_ints: Callable[..., Any]) -> tuple[PackedStepSpec, Forward, tuple[Any, ...]]:
        """Returns the step of all slots, the forward that computes it, and its pools.

        `abstract_ints` makes an abstract array of integers of a shape, in place of pending tokens.
        """
        spec = self._decoder.spec(self._specs.num_slots, self._specs.max_len).packed
        if self._pending is None:
            return spec, self._verify, self._cache.pools
        lens, ids = self._pending.lens, self._pending.ids
        return (
            spec,
            self._verify,
            (PendingTokens(abstract_ints(*lens.shape), abstract_ints(*ids.shape)), *self._cache.pools),
        )


@dataclasses.dataclass(frozen=True)
class PendingRows:
    """Tokens of a step: of S rows pending ones and new ones, padded to N; while it is traced."""

    pending: PendingTokens
    slots: jax.Array  # int32[S]; the last row of `pending` for rows that are not used
    first: jax.Array  # int32[S], position of each row's first new token; 0 for a row that is not used
    num_pending: jax.Array  # int32[S], number of pending tokens
    cu: jax.Array  # int32[S + 1], where each row begins
    rows: jax.Array  # int32[N]
    offsets: jax.Array  # int32[N], place of each token in its row

    @classmethod
    def of(
        cls, pending: PendingTokens, slots: jax.Array, first: jax.Array, counts: jax.Array, num_tokens: int
    ) -> PendingRows:
        """Returns the tokens of rows with `counts` int32[S] new tokens from `first` int32[S] on."""
        slots = jnp.where(first > 0, slots, len(pending.lens) - 1)
        num_pending = jnp.where(first > 0, first - pending.lens[slots], 0)
        ends = jnp.cumsum(num_pending + counts, dtype=jnp.int32)
        cu = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        index = jnp.minimum(jnp.arange(num_tokens, dtype=jnp.int32), jnp.maximum(ends[-1] - 1, 0))
        rows = jnp.minimum(num_at_most(ends, index), len(slots) - 1)
        return cls(pending, slots, first, num_pending, cu, rows, index - cu[rows])

    def pending_ids(self) -> jax.Array:
        """Returns pending tokens, int32[N]; what is not one has no meaning."""
        width = self.pending.ids.shape[1]
        return self.pending.ids[self.slots[self.rows], jnp.clip(self.offsets, 0, width - 1)]

    def batch(
        self,
        ids: jax.Array,
        tables: tuple[jax.Array, ...],
        adapters: jax.Array | None,
        kept_lens: jax.Array,
        *,
        has_rope_lens: bool,
    ) -> PackedBatch:
        """Returns the step of tokens `ids` int32[N], which keeps states behind `kept_lens` int32[S].

        Adapters are int32[S].
        """
        num_tokens, starts = jnp.diff(self.cu), self.first - self.num_pending
        positions = jnp.maximum(starts[self.rows] + self.offsets, 0)
        return PackedBatch(
            token_ids=ids,
            positions=positions,
            cu_q_lens=self.cu,
            kv_lens=jnp.where(num_tokens > 0, starts + num_tokens, 0),
            last=jnp.maximum(self.cu[1:] - 1, 0),
            page_tables=tables,
            rope_lens=positions + 1 if has_rope_lens else None,
            adapters=None if adapters is None else adapters[self.rows],
            slots=self.slots,
            kept_lens=kept_lens,
        )

    def kept(self, lens: jax.Array, ids: jax.Array) -> PendingTokens:
        """Returns what is pending of rows whose states hold `lens` int32[S] tokens; `ids` follow."""
        of_slots = self.pending.lens.at[self.slots].set(lens), self.pending.ids.at[self.slots].set(ids)
        return PendingTokens(*of_slots)


def _constrain_pools(
    constrain: Callable[[tuple[Any, ...]], tuple[Any, ...]], pools: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Constrains the pools by `constrain`; pending tokens in front of them stay as they are."""
    if not isinstance(pools[0], PendingTokens):
        return constrain(pools)
    return pools[0], *constrain(tuple(pools[1:]))
