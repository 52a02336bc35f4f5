"""`Sampler`: samples for the slots of an engine, with state on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from torchax_serve.compilation.background import CompileTask
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.request_params import GREEDY, NEUTRAL, RequestParams
from torchax_serve.sampling.history import empty_history, history_row, padded_row, with_room_for
from torchax_serve.sampling.sample import logprobs_of, sample
from torchax_serve.sampling.token_masks import ALL_TOKENS, num_words
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour
from torchax_serve.sampling.types import (
    FLOAT_COLUMNS,
    FORCED_LAST,
    IN_PROMPT,
    INT_COLUMNS,
    IS_STOP,
    LEVELS,
    MAX_NUM_TOP,
    NOT_FIRST,
    NUM_NEW,
    SUPPRESSED,
    Level,
    Logprobs,
    RowOptions,
    Sampled,
    SamplerHistory,
    SamplerSpec,
    SamplerState,
    SamplerTables,
)
from torchax_serve.scheduler import DecodeBatch, PlanRow


def tables_bytes(num_slots: int, vocab_size: int, max_len: int) -> int:
    """Returns the bytes of the sampler's tables and history, which are allocated on demand."""
    history = sum(array.nbytes for array in jax.tree.leaves(empty_history(num_slots, max_len)))
    return num_slots * vocab_size * sum(dtype.itemsize for dtype in _TABLE_DTYPES.values()) + history


PROGRAM_LEVELS: dict[Level, Level] = {
    "greedy": "greedy",
    "sampled": "sampled",
    "penalties": "history",
    "history": "history",
}
"""Level of the program that samples a batch, by the lowest level that covers its rows: three programs in all."""


_NO_LOGPROBS = -1


class BatchRows(NamedTuple):
    """The rows of a step as their slots have them, padded to n."""

    is_sampled: np.ndarray  # bool[n]; False: padding, or no token is sampled
    ints: Any  # numpy, which goes to the device with the call
    floats: Any
    prompt_len: np.ndarray
    num_tokens_with_tables: np.ndarray
    needs_tables: bool  # some row needs them for its first tokens
    level: Level  # the lowest that covers all rows, those beyond `num_tokens_with_tables` if no step is given
    num_top: int | None  # None: no row needs log-probabilities

    def at_prompt_start(self) -> RowOptions:
        """Returns the options as they are before the first token of the prompt."""
        ints = self.ints.copy()
        ints[:, NUM_NEW] = np.where(self.is_sampled, -self.prompt_len, 0)
        return RowOptions(ints, self.floats)


class SlotParams:
    """Host tables of the options of the request in each slot.

    Rows that do not sample come out of `rows` as padding does: greedy, and with a slot that nothing is written to.

    Args:
        num_slots: Number of slots.
        vocab_size: Number of columns of the logits.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.num_slots, self.vocab_size = num_slots, vocab_size
        # The last row is that of padding.
        self._ints = np.zeros((num_slots + 1, len(INT_COLUMNS)), np.int32)
        for name in ("slot", "table_slot", "history_slot"):
            self._ints[:, INT_COLUMNS.index(name)] = num_slots
        self._floats = np.tile(np.array([NEUTRAL[name] for name in FLOAT_COLUMNS], np.float32), (num_slots + 1, 1))
        self._prompt_len = np.zeros(num_slots + 1, np.int32)
        self._num_tokens_with_tables = np.zeros(num_slots + 1, np.int32)
        self._level = np.zeros(num_slots + 1, np.int8)
        self._num_top = np.full(num_slots + 1, _NO_LOGPROBS, np.int32)
        self._last: tuple[tuple[bytes, int], BatchRows] | None = None

    def set(
        self,
        slot: int,
        params: RequestParams,
        prompt_ids: Sequence[int],
        outputs: Sequence[int] = (),
        *,
        max_new_tokens: int | None = None,
        num_padding: int = 0,
        seed_row: int = 0,
    ) -> tuple[SamplerTables | None, SamplerHistory | None]:
        """Assigns `slot` to a request, in place of the one before.

        Args:
            slot: Row of the decode batch.
            params: Options of the request.
            prompt_ids: Prompt.
            outputs: Tokens that the request was given before it was preempted.
            max_new_tokens: Most new tokens; None: as its options say.
            num_padding: Number of padding tokens on the left of the prompt, which no penalty counts.
            seed_row: Number of the row among those that share a seed.

        Returns:
            What has to be written into the slot's rows of the tables and of the history on the device; None for those
            that the request does not need.
        """
        assert 0 <= slot < self.num_slots
        self._last = None
        prompt_len = len(prompt_ids)
        has_tables = params.needs_tables(prompt_len)
        self._prompt_len[slot] = prompt_len
        self._num_top[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._num_tokens_with_tables[slot] = params.num_tokens_with_tables(prompt_len)
        self._level[slot] = LEVELS.index(params.level)
        self._floats[slot] = [getattr(params, name) for name in FLOAT_COLUMNS]
        seed = params.seed or 0
        seed_bits = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
        columns = {
            "slot": slot,
            "table_slot": slot if has_tables else self.num_slots,
            "history_slot": slot if params.depends_on_order else self.num_slots,
            "top_k": min(params.top_k, self.vocab_size),
            "num_new": 0,  # that of the step: `rows` fills it in
            "min_new_tokens": params.num_forced_tokens(prompt_len),
            "seed_low": seed_bits[0],
            "seed_high": seed_bits[1],
            "seed_row": seed_row,
        }
        self._ints[slot] = [columns[name] for name in INT_COLUMNS]
        tables = self._table_row(params, prompt_ids[num_padding:], outputs) if has_tables else None
        if not params.depends_on_order:
            return tables, None
        most = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        return tables, history_row(params, prompt_ids, outputs, most)

    def rows(self, plan_rows: Sequence[PlanRow], num_rows: int, ahead: int = 0) -> tuple[RowOptions, BatchRows]:
        """Returns the options of a step's rows, padded, and `step_rows`.

        Args:
            plan_rows: Rows of the plan.
            num_rows: Number of rows of the logits, at least as many.
            ahead: Number of steps since the first one of the plan; above 0 all rows decode.
        """
        batch_rows = self.step_rows(plan_rows, num_rows, ahead)
        ints = batch_rows.ints.copy()
        ints[:, NUM_NEW] = self._num_new(batch_rows, plan_rows, ahead)
        return RowOptions(ints, batch_rows.floats), batch_rows

    def step_rows(self, plan_rows: Sequence[PlanRow], num_rows: int, ahead: int = 0) -> BatchRows:
        """Returns the step-independent options of a step's rows, at the level of the step."""
        if isinstance(plan_rows, DecodeBatch):
            slots = plan_rows.slots
        else:
            slots = np.array([row.slot if row.samples_token else self.num_slots for row in plan_rows], np.int32)
        batch_rows = self.batch_rows(slots, num_rows)
        if batch_rows.needs_tables and LEVELS.index(batch_rows.level) < LEVELS.index("penalties"):
            is_early = self._num_new(batch_rows, plan_rows, ahead) < batch_rows.num_tokens_with_tables
            return batch_rows._replace(level="penalties") if is_early.any() else batch_rows
        return batch_rows

    @staticmethod
    def _num_new(batch_rows: BatchRows, plan_rows: Sequence[PlanRow], ahead: int) -> np.ndarray:
        ends = np.zeros(len(batch_rows.is_sampled), np.int32)
        ends[: len(plan_rows)] = [row.context_len + row.num_tokens for row in plan_rows]
        return np.where(batch_rows.is_sampled, ends + ahead - batch_rows.prompt_len, 0)

    def batch_rows(self, slots: np.ndarray, num_rows: int) -> BatchRows:
        """Returns the step-independent options of `slots`; memoized, as most steps repeat them.

        Args:
            slots: int32[at most num_rows]; num_slots for a row that does not sample.
            num_rows: Number of rows to pad to.
        """
        key = slots.tobytes(), num_rows
        if self._last is None or self._last[0] != key:
            self._last = key, self._rows_of(slots, num_rows)
        return self._last[1]

    def _rows_of(self, slots: np.ndarray, num_rows: int) -> BatchRows:
        rows = np.full(num_rows, self.num_slots)
        rows[: len(slots)] = slots
        logprobs = int(self._num_top[rows].max())
        num_top = None if logprobs == _NO_LOGPROBS else logprobs
        num_tokens_with_tables = self._num_tokens_with_tables[rows]
        return BatchRows(
            is_sampled=rows < self.num_slots,
            ints=self._ints[rows],
            floats=self._floats[rows],
            prompt_len=self._prompt_len[rows],
            num_tokens_with_tables=num_tokens_with_tables,
            needs_tables=bool(num_tokens_with_tables.any()),
            level=LEVELS[int(self._level[rows].max())],
            num_top=num_top,
        )

    def num_top(self, slot: int) -> int | None:
        """Returns the number of top log-probabilities of the request in `slot`; None: none at all."""
        return None if self._num_top[slot] == _NO_LOGPROBS else int(self._num_top[slot])

    def _table_row(self, params: RequestParams, prompt_ids: Sequence[int], outputs: Sequence[int]) -> SamplerTables:
        """Returns the slot's rows of the tables; ids without a column, such as images', are ignored."""
        flags = np.zeros(self.vocab_size, np.uint8)
        for ids, bit in (
            (prompt_ids, IN_PROMPT),
            (params.stop_ids, IS_STOP),
            (params.forbidden_first, NOT_FIRST),
            (params.suppressed, SUPPRESSED),
            (params.forced_last, FORCED_LAST),
        ):
            array = np.asarray(ids, np.int64)
            flags[np.unique(array[(array >= 0) & (array < self.vocab_size)])] |= bit
        counts = np.bincount(np.asarray(outputs, np.int64), minlength=self.vocab_size)[: self.vocab_size]
        own = params.token_bias
        bias = np.zeros(self.vocab_size, np.float32) if own is None else own.dense(self.vocab_size)
        arrays: Any = (counts.astype(np.int32), flags, bias)
        return SamplerTables(*arrays)


class Sampler:
    """Samples the tokens of each step.

    For each shape of the logits there are three sampling programs (`PROGRAM_LEVELS`), and one for log-probabilities. No
    option compiles another, except a history that is larger than `empty_history`. Masks of tokens are an argument of
    them, which stays on the device while no row has one. `compile_tasks` has all of them, but not `prompt_logprobs`,
    which packed models do not need.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        sharding: jax.sharding.Sharding | None = None,
        *,
        max_len: int | None = None,
        rules: TransformersBehaviour | None = None,
        num_top: int = MAX_NUM_TOP,
    ) -> None:
        """Makes an empty sampler.

        Args:
            num_slots: Number of slots.
            vocab_size: Number of columns of the logits.
            sharding: Placement of the state; None: this host's first device. For logits on a mesh it is replicated
                there. Never left to JAX: an uncommitted array compiles another program than a committed one, so that
                each would be compiled twice.
            max_len: Maximum number of tokens of a request; None: the history grows with the requests.
            rules: Release of transformers whose processors are followed; None: the installed one.
            num_top: Top log-probabilities that its programs return.
        """
        self._sharding, self._rules = sharding or default_sharding(), rules
        self._num_top = num_top
        is_on_mesh = len(self._sharding.device_set) > 1
        programs = ExecutableCache(None if is_on_mesh else programs_dir(), "sampling")  # the same for every model
        cached = functools.partial(CachedFunction, programs, is_pure=True)
        self._sample = cached("sample", _sample, donate={"state": 1})
        self._logprobs = cached("logprobs", _logprobs)
        self._prompt_logprobs = cached("prompt_logprobs", _prompt_logprobs)
        self._write_rows = cached("write_rows", _write_rows, donate={"arrays": None})
        self._num_slots, self._vocab_size, self._max_len = num_slots, vocab_size, max_len
        self.reset()

    def reset(self) -> None:
        """Removes all requests, but not the compiled programs."""
        self.slots = SlotParams(self._num_slots, self._vocab_size)
        self.state = SamplerState.empty(self._num_slots, self._sharding)
        self._failures: dict[int, Exception] = {}
        self._placed: tuple[BatchRows, RowOptions] | None = None
        self._unmasked: dict[int, jax.Array] = {}  # by number of rows, a bitmask of ones

    @property
    def num_programs(self) -> int:
        """Number of programs compiled or loaded so far that sample or compute log-probabilities."""
        return sum(each.num_programs for each in (self._sample, self._logprobs, self._prompt_logprobs))

    @property
    def last_tokens(self) -> jax.Array:
        """int32[num_slots], token sampled last in each slot; donated by the next `sample`."""
        return self.state.last_tokens

    def assign_slot(
        self,
        slot: int,
        params: RequestParams,
        prompt_ids: Sequence[int],
        outputs: Sequence[int] = (),
        max_new_tokens: int | None = None,
    ) -> None:
        """Assigns `slot` to a request, before the first step with a row of it.

        If arrays for it cannot be made, `take_failures` returns the error, and the slot's row asks for nothing.

        Args:
            slot: Row of the decode batch.
            params: Options of the request.
            prompt_ids: Prompt.
            outputs: Tokens that the request was given before it was preempted.
            max_new_tokens: Most new tokens; None: as its options say.
        """
        try:
            tables, history = self.slots.set(slot, params, prompt_ids, outputs, max_new_tokens=max_new_tokens)
            if tables is not None or history is not None:
                self._write(slot, tables, history)
        except Exception as error:  # the others of the step go on; this row is computed and not read
            self._failures[slot] = error
            self.slots.set(slot, GREEDY, (), ())

    def _write(self, slot: int, tables: SamplerTables | None, history: SamplerHistory | None) -> None:
        """Writes the rows of `slot`, where it is one, into tables and history; None: zeros."""
        self._allocate()
        state = self.state
        assert state.tables is not None and state.history is not None
        larger = state.history if history is None else with_room_for(state.history, history, self._sharding)
        rows = tables or _zero_row(state.tables), _zero_row(larger) if history is None else padded_row(history, larger)
        written, larger = self._write_rows({}, (state.tables, larger), np.int32(slot), rows, spec=None)
        self.state = dataclasses.replace(state, tables=written, history=larger)

    def _allocate(self) -> None:
        """Makes empty tables and an empty history if there are none."""
        if self.state.tables is None:
            made = jax.device_put(self._empty_arrays(), self._sharding)
            self.state = dataclasses.replace(self.state, tables=made[0], history=made[1])

    def _empty_arrays(self) -> tuple[SamplerTables, SamplerHistory]:
        """Returns empty tables and an empty history on the host."""
        shape = (self._num_slots, self._vocab_size)
        zeros: dict[str, Any] = {name: np.zeros(shape, dtype) for name, dtype in _TABLE_DTYPES.items()}
        return SamplerTables(**zeros), empty_history(self._num_slots, self._max_len)

    def sample(
        self, plan_rows: Sequence[PlanRow], logits: jax.Array, ahead: int = 0, bitmask: np.ndarray | None = None
    ) -> Sampled:
        """Dispatches the sampling of a token for each row and returns at once.

        Args:
            plan_rows: Rows of the plan; those that do not sample get a token without meaning.
            logits: float[n, vocab], of each row's last token; n may exceed the number of rows.
            ahead: Number of steps since the first one of the plan.
            bitmask: int32[n, ceil(vocab / 32)], tokens that each row may sample (`mask_logits`); None: all.
        """
        options, batch_rows = self.slots.rows(plan_rows, len(logits), ahead)
        placed = self._all_allowed(len(logits)) if bitmask is None else jax.device_put(bitmask, self._sharding)
        level = PROGRAM_LEVELS[batch_rows.level]
        if level == "history":
            self._allocate()
        spec = _spec_of(level, self._rules)
        sampled, state = self._sample({}, options, self.take_state(level), logits, placed, spec=spec)
        self.set_state(state)
        if batch_rows.num_top is not None:
            logprobs = self.logprobs(logits, sampled.tokens, batch_rows.num_top, len(plan_rows), placed)
            logprobs = dataclasses.replace(logprobs, processed=sampled.token_logprobs)
            sampled = dataclasses.replace(sampled, logprobs=logprobs)
        return sampled

    def _all_allowed(self, num_rows: int) -> jax.Array:
        """Returns the bitmask of rows without masks, which stays on the device."""
        if num_rows not in self._unmasked:
            bitmask = np.full((num_rows, num_words(self._vocab_size)), ALL_TOKENS)
            self._unmasked[num_rows] = jax.device_put(bitmask, self._sharding)
        return self._unmasked[num_rows]

    def take_failures(self) -> dict[int, Exception]:
        """Returns the errors by slot since the last call, each of one request."""
        failures, self._failures = self._failures, {}
        return failures

    def fused_options(
        self, plan_rows: Sequence[PlanRow], num_rows: int, *, has_logprobs: bool = False
    ) -> tuple[RowOptions, bool] | None:
        """Returns options for a program that samples in it, and whether any row draws tokens.

        None if a row needs tables or a history, or log-probabilities that the program does not compute
        (`has_logprobs`). The options are those of rows before the first token of their prompts; the program adds the
        length of each row to them (`RowOptions.advanced`). So they stay on the device while the same requests decode.
        The program gets the state `take_state("sampled")`, and `set_state` its new one.
        """
        batch_rows = self.slots.step_rows(plan_rows, num_rows)
        wants_logprobs = batch_rows.num_top is not None
        if (wants_logprobs and not has_logprobs) or batch_rows.level not in ("greedy", "sampled"):
            return None
        return self._on_device(batch_rows), batch_rows.level == "sampled"

    def _on_device(self, batch_rows: BatchRows) -> RowOptions:
        if self._placed is None or self._placed[0] is not batch_rows:
            self._placed = batch_rows, jax.device_put(batch_rows.at_prompt_start(), self._sharding)
        return self._placed[1]

    def take_state(self, level: Level) -> SamplerState:
        """Returns the state as a program of this level takes it, to be donated."""
        # What a level does not use is no argument of it: the program is the same with and without it.
        return self.state if level == "history" else dataclasses.replace(self.state, tables=None, history=None)

    def set_state(self, state: SamplerState) -> None:
        """Sets the state that a program returned, with or without tables and history."""
        self.state = dataclasses.replace(
            state, tables=state.tables or self.state.tables, history=state.history or self.state.history
        )

    def logprobs(
        self, logits: jax.Array, tokens: jax.Array, num_top: int, num_rows: int, bitmask: jax.Array
    ) -> Logprobs:
        """Computes log-probabilities of `tokens` int32[n], without those that `bitmask` excludes.

        The result has the likeliest tokens, as many as programs return; they have a meaning if `num_top` is above 0.
        Only the first `num_rows` rows are read.
        """
        found: Logprobs = self._logprobs(
            {}, logits, tokens, bitmask, np.bool_(num_top > 0), np.int32(num_rows), spec=self._num_top
        )
        return found

    def prompt_logprobs(
        self, logits: jax.Array, following: np.ndarray, last: np.ndarray, num_top: int, num_tokens: int
    ) -> tuple[Logprobs, jax.Array]:
        """Computes the log-probabilities of tokens of prompts, and takes the logits of some tokens.

        Args:
            logits: float[T, vocab], of each token of a step.
            following: int32[T], the token that follows each.
            last: int32[n], the tokens whose logits are returned, [n, vocab].
            num_top: Number of the likeliest tokens that are read.
            num_tokens: Number of tokens that are no padding.
        """
        has_top = np.bool_(num_top > 0)
        found: tuple[Logprobs, jax.Array] = self._prompt_logprobs(
            {}, logits, following, last, has_top, np.int32(num_tokens), spec=self._num_top
        )
        return found

    def compile_tasks(self, like: Any) -> Iterator[CompileTask]:
        """Yields every program for logits [n, vocab] like `like`; any thread may compile them."""
        logits = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=self._sharding)
        options = SlotParams(self._num_slots, self._vocab_size).rows((), logits.shape[0])[0]
        arrays = self._empty_arrays()
        last_tokens, (tables, history) = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding),
            (np.zeros(self._num_slots, np.int32), arrays),
        )

        def task(function: CachedFunction, *args: Any, spec: Any = None) -> CompileTask:
            compile = functools.partial(function.compiled, {}, *args, spec=spec)
            return CompileTask((function.name, spec, logits.shape, logits.dtype), compile)

        bitmask = jax.ShapeDtypeStruct(
            (logits.shape[0], num_words(self._vocab_size)), np.int32, sharding=self._sharding
        )
        for level in dict.fromkeys(PROGRAM_LEVELS.values()):
            state = SamplerState(last_tokens, *((tables, history) if level == "history" else ()))
            yield task(self._sample, options, state, logits, bitmask, spec=_spec_of(level, self._rules))
        yield task(self._write_rows, (tables, history), np.int32(0), _zero_row(arrays))
        tokens = jax.ShapeDtypeStruct(logits.shape[:1], np.int32, sharding=self._sharding)
        yield task(self._logprobs, logits, tokens, bitmask, np.bool_(False), np.int32(0), spec=self._num_top)


def default_sharding() -> jax.sharding.Sharding:
    """Returns the place of a sampler's state: this host's first device."""
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


@functools.cache
def _spec_of(level: Level, rules: TransformersBehaviour | None) -> SamplerSpec:
    return SamplerSpec(level, rules=rules if level == "history" else None)


# As `CachedFunction` takes them: there are no weights, and a spec only where something is static.


def _sample(
    weights: Any, options: RowOptions, state: SamplerState, logits: jax.Array, bitmask: jax.Array, spec: SamplerSpec
) -> tuple[Sampled, SamplerState]:
    return sample(spec, options, state, logits, bitmask)


def _logprobs(
    weights: Any,
    logits: jax.Array,
    tokens: jax.Array,
    bitmask: jax.Array,
    has_top: jax.Array,
    num_rows: jax.Array,
    spec: int,
) -> Logprobs:
    return logprobs_of(logits, tokens, bitmask, num_top=spec, has_top=has_top, num_rows=num_rows)


def _prompt_logprobs(
    weights: Any,
    logits: jax.Array,
    following: jax.Array,
    last: jax.Array,
    has_top: jax.Array,
    num_tokens: jax.Array,
    spec: int,
) -> tuple[Logprobs, jax.Array]:
    logprobs = logprobs_of(logits, following, num_top=spec, has_top=has_top, num_rows=num_tokens)
    return logprobs, jnp.take(logits, last, axis=0)


_TABLE_DTYPES: dict[str, np.dtype] = {
    "counts": np.dtype(np.int32),
    "flags": np.dtype(np.uint8),
    "bias": np.dtype(np.float32),
}


def _write_rows(
    weights: Any,
    arrays: tuple[SamplerTables, SamplerHistory],
    slot: jax.Array,
    rows: tuple[SamplerTables, SamplerHistory],
    spec: None,
) -> tuple[SamplerTables, SamplerHistory]:
    """Returns the arrays of all slots with `rows` at `slot`, if there is one."""
    return jax.tree.map(lambda array, row: array.at[slot].set(row, mode="drop"), arrays, rows)


def _zero_row(arrays: Any) -> Any:
    """Returns zeros for the rows of a slot, on the host."""
    return jax.tree.map(lambda array: np.zeros(array.shape[1:], array.dtype), arrays)
