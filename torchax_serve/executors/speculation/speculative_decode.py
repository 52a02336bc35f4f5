"""Decode steps that verify drafts: several tokens of each row in a step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import Pool
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.compilation.background import CompileTask
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.executors.base import MakeBitmask
from torchax_serve.executors.slot_adapters import SlotAdapters
from torchax_serve.executors.speculation.draft_head import DraftHead
from torchax_serve.executors.speculation.draft_model import DraftCache, DraftModel, Pick, kept
from torchax_serve.executors.speculation.prompt_lookup import TokenHistory, accept, last_tokens
from torchax_serve.executors.speculation.verified_tokens import VerifiedTokens, VerifyScores, replace_tokens
from torchax_serve.executors.speculation.verify_steps import DraftSpecs, VerifyBatch, VerifySpec, VerifySteps
from torchax_serve.executors.step_programs import StepCall, StepPrograms
from torchax_serve.executors.traced_function import TracedFunction
from torchax_serve.sampling.sample import choose, with_rows
from torchax_serve.sampling.sampler import Sampler, SlotParams, default_sharding
from torchax_serve.sampling.types import INT_COLUMNS, RowOptions, SamplerSpec, SamplerState
from torchax_serve.scheduler import DraftResult, PlanRow, RequestId, SpeculativeConfig, StepPlan

Forward = Callable[..., tuple[jax.Array, tuple[Pool, ...], jax.Array | None]]
"""Forward of a packed step: logits of every token, the pools, and the hidden states that a draft head reads."""

Drafts = tuple[jax.Array, jax.Array, tuple[Pool, ...], DraftCache | None]
"""Drafts int32[S, k], whether a row has any, bool[S], and pools and cache afterwards."""


class SpeculativeDecoder:
    """Runs plans with drafts on the cache of a packed executor.

    Tokens and lengths of all slots are on the device, so that a dispatch can be sent before the one before it is read.

    Args:
        config: Options of speculation.
        forward: Forward of a packed step.
        weights: Weights by name.
        executables: Cache of compiled steps.
        compiled: Makes a cached function of the model.
        specs: Sizes of the executor's steps.
        pools: Returns the pages as they are now.
        adapters: The adapter of each slot.
        draft: Model or head that drafts; None: drafts are looked up.
        constrain_pools: Constrains pools to the shardings that programs take them with; None: the head's own does, if
            there is one.

    Attributes:
        history: Tokens of the slots since steps with drafts began; None: none was run.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        forward: Forward,
        weights: Weights,
        executables: ExecutableCache,
        compiled: Callable[..., CachedFunction],
        specs: DraftSpecs,
        *,
        pools: Callable[[], tuple[Any, ...]],
        adapters: SlotAdapters,
        draft: DraftModel | DraftHead | None = None,
        constrain_pools: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
    ) -> None:
        self._config, self._forward, self._weights = config, forward, weights
        self._adapters = adapters
        self._specs, self._decode_buckets, self._pools = specs, specs.decode_buckets, pools
        self._num_slots, self._max_num_steps, self._max_len = specs.num_slots, specs.max_num_steps, specs.max_len
        self._function = compiled(
            "verify_steps", self._verify, donate={"pools": 1, "state": 2, "history": 3, "draft_cache": 4}
        )
        self._replace = compiled("replace_tokens", _replace, donate={"history": 0, "results": 1}, is_pure=True)
        self._step_programs: StepPrograms[VerifySpec] = StepPrograms(weights, executables, self._call_of)
        self.history: TokenHistory | None = None
        self._head = draft if isinstance(draft, DraftHead) else None
        self._constrain_pools = (
            constrain_pools if self._head is None or constrain_pools is not None else self._head.constrain_pools
        )
        self._draft = draft if isinstance(draft, DraftModel) else None
        self._draft_name = None if draft is None else draft.identity
        self._cache: DraftCache | None = None
        self._owners: dict[int, RequestId] = {}  # by slot, whose tokens are in the cache of the draft model

    @property
    def num_programs(self) -> int:
        """Compiled steps."""
        return self._function.num_programs + self._replace.num_programs

    def spec(self, num_rows: int, end: int, is_scored: bool = False) -> VerifySpec:
        """Returns the spec of steps of `num_rows` rows or more, of at most `end` tokens each."""
        config = self._config
        size = next(bucket for bucket in self._decode_buckets if bucket >= num_rows)
        packed = self._specs.of_drafts(size, size * (config.num_speculative_tokens + 1), end)
        return VerifySpec(
            packed,
            self._max_num_steps,
            config.num_speculative_tokens,
            config.prompt_lookup_max,
            config.prompt_lookup_min,
            self._draft_name,
            is_scored,
        )

    def run(self, plan: StepPlan, sampler: Sampler) -> tuple[tuple[jax.Array, VerifyScores | None], tuple[Pool, ...]]:
        """Dispatches the steps of a plan with drafts.

        Returns:
            int32[max_num_steps, S, k + 3], for each step and row the sampled tokens, the number of those that are
            accepted, and the number of drafts, and the scores if a row needs any; and the pools.
        """
        drafts = plan.drafts
        assert drafts is not None
        rows, end = _sampled_rows(plan, needs_sampler=False), max(drafts.ends)
        num_rows = self.spec(len(rows), end).packed.num_rows
        found = sampler.fused_options(rows, num_rows, has_logprobs=True)
        assert found is not None, "the scheduler says which rows have more than greedy and sampled tokens"
        (options, draws), num_top = found, sampler.slots.step_rows(rows, num_rows).num_top
        spec = self.spec(len(rows), end, num_top is not None or any(drafts.needs_sampler))
        packed = spec.pack(plan.rows, drafts, plan.page_tables, plan.num_steps, draws, num_top)
        numbers = self._adapters.append_to(packed)
        if drafts.histories is not None:
            self.history = self._on_device(plan.rows, drafts.histories, sampler)
        assert self.history is not None
        weights = None if self._draft is None else self._draft.weights
        args = (self._pools(), sampler.take_state("sampled"), self.history, options, numbers, weights, self._cache)
        program = self._step_programs.get(spec, StepCall(self._function, args))
        results, pools, state, self.history, self._cache = program(self._weights, *args)
        sampler.set_state(state)
        return results, pools

    def sample(
        self,
        plan: StepPlan,
        sampler: Sampler,
        results: tuple[jax.Array, VerifyScores | None],
        make_bitmask: MakeBitmask | None,
    ) -> VerifiedTokens:
        """Samples the rows that need the sampler, behind `run`; returns all tokens of the plan.

        Args:
            plan: The plan of `run`.
            sampler: Sampler of the slots.
            results: What `run` has returned.
            make_bitmask: Computes the bitmask of the rows, as `Sampler.sample` takes it; None: no row is masked.
        """
        (tokens, scores), drafts = results, plan.drafts
        assert drafts is not None
        logprobs = None if scores is None else scores.logprobs
        if not any(drafts.needs_sampler):
            return VerifiedTokens(tokens, logprobs, None, drafts.needs_sampler)
        assert scores is not None
        bitmask = None if make_bitmask is None else make_bitmask(len(scores.logits))
        sampled = sampler.sample(_sampled_rows(plan, needs_sampler=True), scores.logits, bitmask=bitmask)
        slots = np.full(tokens.shape[1], self._num_slots, np.int32)
        of_rows = zip(plan.rows, drafts.needs_sampler, strict=True)
        slots[: len(plan.rows)] = [row.slot if is_sampled else self._num_slots for row, is_sampled in of_rows]
        self.history, tokens = self._replace({}, self.history, tokens, slots, sampled.tokens, spec=None)
        return VerifiedTokens(tokens, logprobs, sampled, drafts.needs_sampler)

    def _on_device(self, rows: Sequence[PlanRow], histories: Sequence[Sequence[int]], sampler: Sampler) -> TokenHistory:
        ids, lens = np.zeros((self._num_slots, self._max_len), np.int32), np.zeros(self._num_slots, np.int32)
        for row, tokens in zip(rows, histories, strict=True):
            ids[row.slot, : len(tokens)], lens[row.slot] = tokens, len(tokens)
        sharding = sampler.last_tokens.sharding
        made: Any = jax.device_put((ids, lens), sharding)
        if self._draft is not None:
            self._cache = self._cache_for(rows, self._draft, sharding)
        return TokenHistory(*made)

    def _cache_for(self, rows: Sequence[PlanRow], draft: DraftModel, sharding: jax.sharding.Sharding) -> DraftCache:
        """Returns the cache of the draft model, in which slots that have changed hands are empty."""
        cache = self._cache
        if cache is None or cache.lens.is_deleted():
            cache, self._owners = draft.empty_cache(sharding), {}
        is_same = np.zeros(self._num_slots, bool)
        for row in rows:
            is_same[row.slot] = self._owners.get(row.slot) == row.request_id
        self._owners = {row.slot: row.request_id for row in rows}
        lens: Any = jax.device_put(np.where(is_same, np.asarray(cache.lens), 0).astype(np.int32), sharding)
        return dataclasses.replace(cache, lens=lens)

    def _verify(
        self,
        weights: Weights,
        pools: tuple[Pool, ...],
        state: SamplerState,
        history: TokenHistory,
        options: RowOptions,
        numbers: jax.Array,
        draft_weights: Weights | None,
        draft_cache: DraftCache | None,
        spec: VerifySpec,
    ) -> tuple[tuple[jax.Array, VerifyScores | None], tuple[Pool, ...], SamplerState, TokenHistory, DraftCache | None]:
        """Computes verify steps until there are none left, or all rows are at their ends."""
        steps = VerifySteps.unpack(numbers, spec, self._adapters)
        rows = TokenHistory(history.ids[steps.slots], jnp.where(steps.ends > 0, history.lens[steps.slots], 0))
        # Traced in front of the loop, as decode steps are.
        example = steps.batch(rows, *steps.lookup(rows)).packed
        forward = TracedFunction(functools.partial(self._forward, spec=spec.packed), weights, pools, example)
        cache = draft_cache and DraftCache(draft_cache.pools, draft_cache.lens[steps.slots])
        pick = functools.partial(_pick, options, state, steps.draws)
        propose = self._proposer(steps, rows, pick, (weights, draft_weights), pools, cache)

        # The loop over verify steps. Rows accept different numbers of drafts, so it ends when all are at their ends, or
        # after `num_steps`. The carry:
        #
        #   index    int32[], steps done
        #   results  int32[max_num_steps, S, k + 3], of each step; zeros from `index` on
        #   pools    keys and values; in front of them `PendingTokens`, of a model with recurrent states
        #   rows     tokens of the S rows, those accepted so far among them
        #   cache    of the draft model; None: there is none
        #   scores   what `VerifyScores` has of the steps so far; None: no row asks
        #
        # Invariant: in front of each step the pages of a row hold its first `lens - 1` tokens. A step computes the last
        # token and its drafts. It accepts the drafts that are right and one token more, so that `lens` grows by as much
        # and the pages hold what the next step needs; behind that they hold rejected drafts, which it writes again.
        # The sampler's state is not in the carry: greedy and sampled rows read their options and lengths alone.
        def goes_on(carry: Any) -> jax.Array:
            index, _, _, rows, *_ = carry
            return (index < steps.num_steps) & steps.is_active(rows).any()

        def step(carry: Any) -> Any:
            index, results, pools, rows, cache, scores = carry
            drafts, is_found, pools, cache = propose(rows, pools, cache)
            batch = steps.batch(rows, drafts, is_found)
            logits, pools, hidden = forward(weights, pools, batch.packed)
            chosen = _choose(options, state, logits, batch, steps.draws)
            sampled = chosen[batch.tokens.index(spec.num_drafts)]
            rows, counts = accept(rows, batch.drafts, batch.num_drafts, sampled, batch.is_active)
            if self._head is not None:
                last = batch.tokens.cu_q_lens[:-1] + jnp.maximum(counts - 1, 0)
                pools = self._head.kept(pools, steps, batch.is_active, hidden[last], rows.lens - 1)
            result = jnp.concatenate([sampled, counts[:, None], batch.num_drafts[:, None]], axis=1)
            scores = scores and scores.with_step(index, batch, logits, chosen, steps.has_top)
            return index + 1, results.at[index].set(result), pools, rows, cache and kept(cache, rows), scores

        results = jnp.zeros((spec.max_num_steps, spec.packed.num_rows, spec.num_drafts + 3), jnp.int32)
        scores = VerifyScores.empty(spec, forward.result_shape[0]) if spec.is_scored else None
        carry = (jnp.int32(0), results, pools, rows, cache, scores)
        _, results, pools, rows, cache, scores = jax.lax.while_loop(goes_on, step, carry)
        if self._constrain_pools is not None:
            pools = self._constrain_pools(pools)
        # A row that is not used is written nowhere.
        num_slots = len(state.last_tokens)  # other hosts' executors have slots of their own
        slots = jnp.where(steps.ends > 0, steps.slots, num_slots)
        last = state.last_tokens.at[slots].set(last_tokens(rows), mode="drop")
        history = TokenHistory(
            history.ids.at[slots].set(rows.ids, mode="drop"), history.lens.at[slots].set(rows.lens, mode="drop")
        )
        if cache is not None and draft_cache is not None:
            cache = DraftCache(cache.pools, draft_cache.lens.at[slots].set(cache.lens, mode="drop"))
        if scores is not None:
            scores = dataclasses.replace(scores, logits=with_rows(scores.logits, num_slots))
        return (results, scores), pools, dataclasses.replace(state, last_tokens=last), history, cache

    def _proposer(
        self,
        steps: VerifySteps,
        rows: TokenHistory,
        pick: Pick,
        weights: tuple[Any, Weights | None],
        pools: tuple[Pool, ...],
        cache: DraftCache | None,
    ) -> Callable[[TokenHistory, tuple[Pool, ...], DraftCache | None], Drafts]:
        """Returns the function that drafts, with everything traced that it runs."""
        if self._head is not None:
            head, head_steps = self._head, self._head.steps(weights[0], pools, steps)
            return lambda rows, pools, cache: (*head.propose(head_steps, pools, rows, steps, pick), cache)
        if self._draft is None or weights[1] is None or cache is None:
            return lambda rows, pools, cache: (*steps.lookup(rows), pools, cache)
        draft, draft_steps = self._draft, self._draft.steps(weights[1], cache, rows, steps.slots)

        def propose(rows: TokenHistory, pools: tuple[Pool, ...], cache: Any) -> Drafts:
            is_found = steps.is_drafted(rows)
            drafts, cache = draft.propose(draft_steps, cache, rows, is_found, pick, steps.spec.num_drafts)
            return drafts, is_found, pools, cache

        return propose

    def _call_of(self, spec: VerifySpec) -> StepCall:
        """Returns a step with its arguments as shapes."""
        placed = functools.partial(jax.ShapeDtypeStruct, sharding=default_sharding())
        last_tokens: Any = placed((self._num_slots,), np.int32)
        history: Any = (placed((self._num_slots, self._max_len), np.int32), last_tokens)
        idle = SlotParams(self._num_slots, 1).rows((), spec.packed.num_rows)[0]
        options = jax.tree.map(lambda x: placed(x.shape, x.dtype), idle)
        numbers = self._adapters.empty(spec.size)
        state = SamplerState(last_tokens)
        draft: tuple[Any, Any] = (None, None)
        if self._draft is not None:
            draft = self._draft.weights, self._draft.abstract_cache(default_sharding())
        return StepCall(self._function, (self._pools(), state, TokenHistory(*history), options, numbers, *draft))

    def temporary_bytes(self) -> int:
        """Returns the temporary bytes of the largest step, which has the logits of all its tokens."""
        spec = self.spec(self._decode_buckets[-1], self._max_len)
        function, args = self._call_of(spec)
        if not self._step_programs.compiles_ahead:  # several hosts, which are sent arrays
            args = jax.tree.map(_as_array, args)
        return function.temporary_bytes(self._weights, *args, spec=spec)

    def compile_tasks(self) -> Iterator[CompileTask]:
        """Yields every program that traffic can meet."""
        for is_scored in (False, True):
            for size, end in itertools.product(self._decode_buckets, self._specs.draft_ends):
                yield self._step_programs.task(self.spec(size, end, is_scored))
        for size in self._decode_buckets:
            _, history, *_ = self._call_of(self.spec(size, self._max_len)).args[1:]
            compile = functools.partial(self._replace.compiled, {}, history, *self._replaced(size), spec=None)
            yield CompileTask((self._replace.name, size), compile)

    def _replaced(self, num_rows: int) -> tuple[Any, ...]:
        """Returns results, slots and tokens of a step of `num_rows` rows, a bucket, as shapes."""
        placed = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32, sharding=default_sharding())
        results = placed((self._max_num_steps, num_rows, self._config.num_speculative_tokens + 3))
        return results, np.zeros(num_rows, np.int32), placed((self._num_slots,))


def _as_array(shape: Any) -> Any:
    """Returns zeros of an abstract array; arrays as they are."""
    if not isinstance(shape, jax.ShapeDtypeStruct):
        return shape
    return jax.device_put(np.zeros(shape.shape, shape.dtype), default_sharding())


def _sampled_rows(plan: StepPlan, *, needs_sampler: bool) -> Sequence[PlanRow]:
    """Returns the rows of a draft plan that need the sampler, or the others."""
    assert plan.drafts is not None
    if not needs_sampler and not any(plan.drafts.needs_sampler):
        return plan.rows
    pairs = zip(plan.rows, plan.drafts.needs_sampler, strict=True)
    return [row._replace(samples_token=does_need == needs_sampler) for row, does_need in pairs]


def _replace(
    weights: Weights, history: TokenHistory, results: jax.Array, slots: jax.Array, tokens: jax.Array, spec: None
) -> tuple[TokenHistory, jax.Array]:
    return replace_tokens(history, results, slots, tokens)


def _pick(
    options: RowOptions, state: SamplerState, draws: jax.Array, logits: jax.Array, positions: jax.Array
) -> jax.Array:
    """Chooses the token behind `positions` int32[S] from draft logits [S, vocab]."""
    of_rows = options.advanced(positions + 1)
    greedy, _ = choose(SamplerSpec("greedy"), of_rows, state, logits)
    return jax.lax.cond(draws, lambda: choose(SamplerSpec("sampled"), of_rows, state, logits)[0], lambda: greedy)


def _choose(
    options: RowOptions, state: SamplerState, logits: jax.Array, batch: VerifyBatch, draws: jax.Array
) -> jax.Array:
    """Chooses the token behind each token of a step, int32[T], as decode steps would.

    Args:
        options: Options of the rows at the start of their prompts.
        state: State of the slots.
        logits: float[T, vocab].
        batch: The tokens.
        draws: Whether any row draws, bool[].
    """
    rows, nowhere = batch.tokens.rows, len(state.last_tokens)
    of_tokens = RowOptions(options.ints[rows], options.floats[rows]).advanced(batch.packed.positions + 1)
    is_read = jnp.arange(len(rows)) < batch.tokens.num_tokens
    slots = jnp.where(is_read, of_tokens.int_column("slot"), nowhere)
    of_tokens = dataclasses.replace(of_tokens, ints=of_tokens.ints.at[:, INT_COLUMNS.index("slot")].set(slots))
    greedy, _ = choose(SamplerSpec("greedy"), of_tokens, state, logits)
    return jax.lax.cond(draws, lambda: choose(SamplerSpec("sampled"), of_tokens, state, logits)[0], lambda: greedy)


def read_drafts(results: np.ndarray, num_rows: int) -> DraftResult:
    """Returns what verify steps have brought.

    Args:
        results: int32[num_steps, S, k + 3], as of `SpeculativeDecoder.run`.
        num_rows: Number of rows of the plan.
    """
    results = results[:, :num_rows]
    counts, num_drafts = results[..., -2], results[..., -1]
    tokens = [
        tuple(token for step, count in zip(row, of_row, strict=True) for token in step[:count])
        for row, of_row in zip(results.swapaxes(0, 1).tolist(), counts.T.tolist(), strict=True)
    ]
    num_steps = int((counts > 0).any(axis=1).sum())
    num_accepted = int(np.maximum(counts - 1, 0).sum())
    return DraftResult(tokens, num_steps, int(num_drafts.sum()), num_accepted, int((num_drafts > 0).sum()))
