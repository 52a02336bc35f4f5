"""The host's table of what the request in each slot asks for, and the rows of it that a step needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchax_serve.engine.sampler import (
    FLOAT_COLUMNS,
    IN_PROMPT,
    INT_COLUMNS,
    IS_STOP,
    LEVELS,
    NOT_FIRST,
    NUM_TOP_RUNGS,
    RowOptions,
    SamplerSpec,
)
from torchax_serve.engine.sampler_params import NEUTRAL, RowParams
from torchax_serve.scheduling import PlanRow

_FULL = LEVELS.index("full")
_NO_LOGPROBS = -1


class TableRow(NamedTuple):
    """A slot's rows of `SamplerTables`, on the host."""

    counts: np.ndarray  # int32[vocab]
    flags: np.ndarray  # uint8[vocab]
    bias: np.ndarray  # float32[vocab]


class SlotOptions:
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
        self._is_lone = np.zeros(num_slots + 1, bool)

    def set(
        self, slot: int, params: RowParams, prompt_ids: Sequence[int], outputs: Sequence[int] = ()
    ) -> TableRow | None:
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
        prompt_len = len(prompt_ids)
        self._prompt_len[slot] = prompt_len
        self._num_top[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._is_lone[slot] = params.lone is not None
        self._num_full[slot] = params.num_full(prompt_len)
        self._level[slot] = LEVELS.index(params.level)
        self._floats[slot] = [params.floats[name] for name in FLOAT_COLUMNS]
        seed_bits = np.array([params.seed & 0xFFFFFFFF, params.seed >> 32], np.uint32).view(np.int32)
        # num_new is that of the step: rows() fills it in.
        columns = {"slot": slot, "top_k": params.top_k, "num_new": 0, "min_new_tokens": params.num_early(prompt_len)}
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
        slots = np.full(num_rows, self.num_slots)
        ends = np.zeros(num_rows, np.int32)
        logprobs = _NO_LOGPROBS
        for index, row in enumerate(plan_rows):
            if not row.samples:
                continue
            ends[index] = row.start + row.num_tokens
            logprobs = max(logprobs, int(self._num_top[row.slot]))
            if not self._is_lone[row.slot]:
                slots[index] = row.slot
        num_new = ends + ahead - self._prompt_len[slots]
        ints = self._ints[slots]
        ints[:, INT_COLUMNS.index("num_new")] = np.where(slots < self.num_slots, num_new, 0)
        level = np.where(num_new < self._num_full[slots], _FULL, self._level[slots]).max()
        num_top = next(rung for rung in NUM_TOP_RUNGS if rung >= logprobs)
        spec = SamplerSpec(LEVELS[level], num_top, logprobs != _NO_LOGPROBS)
        return RowOptions(ints, self._floats[slots]), spec

    def is_lone(self, slot: int) -> bool:
        """Whether the request in `slot` is chosen for by itself, with a `LoneSampler`."""
        return bool(self._is_lone[slot])

    def num_top(self, slot: int) -> int | None:
        """How many top log-probabilities the request in `slot` asks for; None if it wants no log-probabilities."""
        return None if self._num_top[slot] == _NO_LOGPROBS else int(self._num_top[slot])

    def _table_row(self, params: RowParams, prompt_ids: Sequence[int], outputs: Sequence[int]) -> TableRow:
        """Token ids without a column, such as those that stand for images, are left out."""
        flags = np.zeros(self.vocab_size, np.uint8)
        for ids, bit in ((prompt_ids, IN_PROMPT), (params.stop_ids, IS_STOP), (params.not_first, NOT_FIRST)):
            array = np.asarray(ids, np.int64)
            flags[np.unique(array[array < self.vocab_size])] |= bit
        counts = np.bincount(np.asarray(outputs, np.int64), minlength=self.vocab_size)[: self.vocab_size]
        bias = np.zeros(self.vocab_size, np.float32) if params.bias is None else params.bias
        return TableRow(counts.astype(np.int32), flags, bias)
