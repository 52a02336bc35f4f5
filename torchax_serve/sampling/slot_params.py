"""`SlotParams`: options of the request in each slot, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchax_serve.sampling.row_params import NEUTRAL, RowSamplingParams
from torchax_serve.sampling.types import (
    FLOAT_COLUMNS,
    FORCED_LAST,
    IN_PROMPT,
    INT_COLUMNS,
    IS_STOP,
    LEVELS,
    NOT_FIRST,
    NUM_NEW,
    SUPPRESSED,
    Level,
    RowOptions,
    SamplerHistory,
    SamplerSpec,
    SamplerTables,
)
from torchax_serve.scheduler import DecodeBatch, PlanRow

_NO_LOGPROBS = -1


class BatchRows(NamedTuple):
    """The rows of a step as their slots have them, padded to n."""

    is_sampled: np.ndarray  # bool[n]; False: padding, or no token is sampled
    ints: Any  # numpy, which goes to the device with the call
    floats: Any
    prompt_len: np.ndarray
    num_tokens_with_tables: np.ndarray
    needs_tables: bool  # some row needs them for its first tokens
    level: Level  # of rows beyond `num_tokens_with_tables`
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
        params: RowSamplingParams,
        prompt_ids: Sequence[int],
        outputs: Sequence[int] = (),
        *,
        num_padding: int = 0,
        seed_row: int = 0,
    ) -> tuple[SamplerTables | None, SamplerHistory | None]:
        """Assigns `slot` to a request, in place of the one before.

        Args:
            slot: Row of the decode batch.
            params: Options of the request.
            prompt_ids: Prompt.
            outputs: Tokens that the request was given before it was preempted.
            num_padding: Number of padding tokens on the left of the prompt, which no penalty counts.
            seed_row: Number of the row among those that share a seed.

        Returns:
            What has to be written into the slot's rows of the tables and of the history on the device; None for those
            that the request does not need.
        """
        assert 0 <= slot < self.num_slots
        assert params.vocab_size == self.vocab_size, "request and model are of one vocabulary"
        self._last = None
        prompt_len = len(prompt_ids)
        has_tables = params.needs_tables(prompt_len)
        self._prompt_len[slot] = prompt_len
        self._num_top[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._num_tokens_with_tables[slot] = params.num_tokens_with_tables(prompt_len)
        self._level[slot] = LEVELS.index(params.level)
        self._floats[slot] = [params.floats[name] for name in FLOAT_COLUMNS]
        seed_bits = np.array([params.seed & 0xFFFFFFFF, params.seed >> 32], np.uint32).view(np.int32)
        columns = {
            "slot": slot,
            "table_slot": slot if has_tables else self.num_slots,
            "history_slot": self.num_slots if params.history is None else slot,
            "top_k": params.top_k,
            "num_new": 0,  # that of the step: `rows` fills it in
            "min_new_tokens": params.num_forced_tokens(prompt_len),
            "seed_low": seed_bits[0],
            "seed_high": seed_bits[1],
            "seed_row": seed_row,
        }
        self._ints[slot] = [columns[name] for name in INT_COLUMNS]
        tables = self._table_row(params, prompt_ids[num_padding:], outputs) if has_tables else None
        history = params.history
        return tables, None if history is None else history.row(prompt_ids, outputs, params.max_new_tokens)

    def rows(self, plan_rows: Sequence[PlanRow], num_rows: int, ahead: int = 0) -> tuple[RowOptions, SamplerSpec]:
        """Returns the options of a step's rows, padded, and the program that covers them.

        Args:
            plan_rows: Rows of the plan.
            num_rows: Number of rows of the logits, at least as many.
            ahead: Number of steps since the first one of the plan; above 0 all rows decode.
        """
        batch_rows, spec = self.level_of(plan_rows, num_rows, ahead)
        ints = batch_rows.ints.copy()
        ints[:, NUM_NEW] = self._num_new(batch_rows, plan_rows, ahead)
        return RowOptions(ints, batch_rows.floats), spec

    def level_of(self, plan_rows: Sequence[PlanRow], num_rows: int, ahead: int = 0) -> tuple[BatchRows, SamplerSpec]:
        """Returns the step-independent options of a step's rows, and the program that covers them."""
        if isinstance(plan_rows, DecodeBatch):
            slots = plan_rows.slots
        else:
            slots = np.array([row.slot if row.samples_token else self.num_slots for row in plan_rows], np.int32)
        batch_rows = self.batch_rows(slots, num_rows)
        level = batch_rows.level
        if batch_rows.needs_tables and LEVELS.index(level) < LEVELS.index("penalties"):
            is_early = self._num_new(batch_rows, plan_rows, ahead) < batch_rows.num_tokens_with_tables
            level = "penalties" if is_early.any() else level
        return batch_rows, SamplerSpec(level, num_top=batch_rows.num_top or 0, logprobs=batch_rows.num_top is not None)

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

    def _table_row(self, params: RowSamplingParams, prompt_ids: Sequence[int], outputs: Sequence[int]) -> SamplerTables:
        """Returns the slot's rows of the tables; ids without a column, such as images', are ignored."""
        flags = np.zeros(self.vocab_size, np.uint8)
        forced_last = () if params.history is None else params.history.forced_last
        for ids, bit in (
            (prompt_ids, IN_PROMPT),
            (params.stop_ids, IS_STOP),
            (params.forbidden_first, NOT_FIRST),
            (params.suppressed, SUPPRESSED),
            (forced_last, FORCED_LAST),
        ):
            array = np.asarray(ids, np.int64)
            flags[np.unique(array[(array >= 0) & (array < self.vocab_size)])] |= bit
        counts = np.bincount(np.asarray(outputs, np.int64), minlength=self.vocab_size)[: self.vocab_size]
        bias = np.zeros(self.vocab_size, np.float32) if params.bias is None else params.bias
        arrays: Any = (counts.astype(np.int32), flags, bias)
        return SamplerTables(*arrays)
