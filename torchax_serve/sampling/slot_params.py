"""The host's table of what the request in each slot asks for, and the rows of it that a step needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchax_serve.sampling.row_params import NEUTRAL, RowSamplingParams
from torchax_serve.sampling.sample import IN_PROMPT, IS_STOP, NOT_FIRST
from torchax_serve.sampling.types import (
    FLOAT_COLUMNS,
    INT_COLUMNS,
    LEVELS,
    NUM_NEW,
    NUM_TOP_BUCKETS,
    Level,
    RowOptions,
    SamplerSpec,
)
from torchax_serve.scheduler import DecodeBatch, PlanRow

_NO_LOGPROBS = -1


class SlotTables(NamedTuple):
    """A slot's rows of `SamplerTables`, on the host."""

    counts: np.ndarray  # int32[vocab]
    flags: np.ndarray  # uint8[vocab]
    bias: np.ndarray  # float32[vocab]


class BatchRows(NamedTuple):
    """The rows of a step as their slots have them, padded."""

    is_sampled: np.ndarray  # bool[n]; False: padding, a row of `HistorySampler`, or no token is sampled
    ints: Any  # numpy, which goes to the device with the call
    floats: Any
    prompt_len: np.ndarray
    num_steps_at_full_level: np.ndarray
    has_full: bool
    level: Level  # of all that are beyond `num_steps_at_full_level`
    num_top: int | None  # a bucket; None: no row needs log-probabilities

    def at_prompt_start(self) -> RowOptions:
        """Options as they are before the first token of the prompt."""
        ints = self.ints.copy()
        ints[:, NUM_NEW] = np.where(self.is_sampled, -self.prompt_len, 0)
        return RowOptions(ints, self.floats)


class SlotParams:
    """What the request in each slot asks for.

    Lone rows, whose options depend on more of their history than counts, and rows that do not sample come out of `rows`
    as padding does: greedy, and with a slot that nothing is written to.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.num_slots, self.vocab_size = num_slots, vocab_size
        # The last row is that of padding.
        self._ints = np.zeros((num_slots + 1, len(INT_COLUMNS)), np.int32)
        self._ints[:, INT_COLUMNS.index("slot")] = num_slots
        self._floats = np.tile(np.array([NEUTRAL[name] for name in FLOAT_COLUMNS], np.float32), (num_slots + 1, 1))
        self._prompt_len = np.zeros(num_slots + 1, np.int32)
        self._num_full = np.zeros(num_slots + 1, np.int32)
        self._level = np.zeros(num_slots + 1, np.int8)
        self._num_top = np.full(num_slots + 1, _NO_LOGPROBS, np.int8)
        self._needs_history = np.zeros(num_slots + 1, bool)
        self._last: tuple[tuple[bytes, int], BatchRows] | None = None

    def set(
        self, slot: int, params: RowSamplingParams, prompt_ids: Sequence[int], outputs: Sequence[int] = ()
    ) -> SlotTables | None:
        """Gives `slot` to a request; what stood there before is forgotten.

        Args:
            slot: row of the decode batch.
            params: of the request.
            prompt_ids: the prompt.
            outputs: tokens the request has been given before it was preempted.

        Returns:
            What has to be written into the slot's rows of the tables on the device; None if the request needs none.
        """
        assert 0 <= slot < self.num_slots
        assert params.vocab_size == self.vocab_size, "request and model are of one vocabulary"
        self._last = None
        prompt_len = len(prompt_ids)
        self._prompt_len[slot] = prompt_len
        self._num_top[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._needs_history[slot] = params.history_config is not None
        self._num_full[slot] = params.num_full_level_tokens(prompt_len)
        self._level[slot] = LEVELS.index(params.level)
        self._floats[slot] = [params.floats[name] for name in FLOAT_COLUMNS]
        seed_bits = np.array([params.seed & 0xFFFFFFFF, params.seed >> 32], np.uint32).view(np.int32)
        # num_new is that of the step: rows() fills it in.
        columns = {
            "slot": slot,
            "top_k": params.top_k,
            "num_new": 0,
            "min_new_tokens": params.num_forced_tokens(prompt_len),
        }
        columns |= {"seed_low": seed_bits[0], "seed_high": seed_bits[1]}
        self._ints[slot] = [columns[name] for name in INT_COLUMNS]
        return self._table_row(params, prompt_ids, outputs) if params.needs_tables(prompt_len) else None

    def rows(self, plan_rows: Sequence[PlanRow], num_rows: int, ahead: int = 0) -> tuple[RowOptions, SamplerSpec]:
        """The options of a step's rows, padded to `num_rows`, and the program that covers them all.

        Args:
            plan_rows: of the plan.
            num_rows: rows of the logits, at least as many.
            ahead: which of the plan's steps it is, from 0; above it all rows decode.
        """
        batch_rows, spec = self.level_of(plan_rows, num_rows, ahead)
        ints = batch_rows.ints.copy()
        ints[:, NUM_NEW] = self._num_new(batch_rows, plan_rows, ahead)
        return RowOptions(ints, batch_rows.floats), spec

    def level_of(self, plan_rows: Sequence[PlanRow], num_rows: int, ahead: int = 0) -> tuple[BatchRows, SamplerSpec]:
        """The program that covers a step's rows, see `rows`, and what does not change while they are the same."""
        if isinstance(plan_rows, DecodeBatch):
            slots = plan_rows.slots
        else:
            slots = np.array([row.slot if row.samples_token else self.num_slots for row in plan_rows], np.int32)
        batch_rows = self._batch_rows(slots, num_rows)
        level = batch_rows.level
        if (
            batch_rows.has_full
            and (self._num_new(batch_rows, plan_rows, ahead) < batch_rows.num_steps_at_full_level).any()
        ):
            level = "full"
        return batch_rows, SamplerSpec(level, batch_rows.num_top or 0, batch_rows.num_top is not None)

    @staticmethod
    def _num_new(batch_rows: BatchRows, plan_rows: Sequence[PlanRow], ahead: int) -> np.ndarray:
        ends = np.zeros(len(batch_rows.is_sampled), np.int32)
        ends[: len(plan_rows)] = [row.context_len + row.num_tokens for row in plan_rows]
        return np.where(batch_rows.is_sampled, ends + ahead - batch_rows.prompt_len, 0)

    def _batch_rows(self, slots: np.ndarray, num_rows: int) -> BatchRows:
        """What does not change while the same requests are in `slots`; kept, as most steps have those of the last."""
        key = slots.tobytes(), num_rows
        if self._last is None or self._last[0] != key:
            self._last = key, self._gathered(slots, num_rows)
        return self._last[1]

    def _gathered(self, slots: np.ndarray, num_rows: int) -> BatchRows:
        asked = np.full(num_rows, self.num_slots)
        asked[: len(slots)] = slots
        mine = np.where(self._needs_history[asked], self.num_slots, asked)
        logprobs = int(self._num_top[asked].max())
        num_top = None if logprobs == _NO_LOGPROBS else next(bucket for bucket in NUM_TOP_BUCKETS if bucket >= logprobs)
        num_full = self._num_full[mine]
        return BatchRows(
            is_sampled=mine < self.num_slots,
            ints=self._ints[mine],
            floats=self._floats[mine],
            prompt_len=self._prompt_len[mine],
            num_steps_at_full_level=num_full,
            has_full=bool(num_full.any()),
            level=LEVELS[int(self._level[mine].max())],
            num_top=num_top,
        )

    def needs_history(self, slot: int) -> bool:
        """Whether the request in `slot` is chosen for by itself, with a `HistorySampler`."""
        return bool(self._needs_history[slot])

    def num_top(self, slot: int) -> int | None:
        """How many top log-probabilities the request in `slot` asks for; None if it wants no log-probabilities."""
        return None if self._num_top[slot] == _NO_LOGPROBS else int(self._num_top[slot])

    def _table_row(self, params: RowSamplingParams, prompt_ids: Sequence[int], outputs: Sequence[int]) -> SlotTables:
        """Token ids without a column, such as those that stand for images, are left out."""
        flags = np.zeros(self.vocab_size, np.uint8)
        for ids, bit in ((prompt_ids, IN_PROMPT), (params.stop_ids, IS_STOP), (params.forbidden_first, NOT_FIRST)):
            array = np.asarray(ids, np.int64)
            flags[np.unique(array[array < self.vocab_size])] |= bit
        counts = np.bincount(np.asarray(outputs, np.int64), minlength=self.vocab_size)[: self.vocab_size]
        bias = np.zeros(self.vocab_size, np.float32) if params.bias is None else params.bias
        return SlotTables(counts.astype(np.int32), flags, bias)
