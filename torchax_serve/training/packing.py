"""Batches of a fixed shape, so that the step is compiled once.

The batch of a step follows from seed and step.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from torchax_serve.training.chats import Example


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """Rows of a step; every field is int32[num_rows, row_len].

    Attributes:
        tokens: Token ids; 0 is padding where `segments` is.
        segments: Number of the example in its row, from 1; 0: padding. A token sees its own segment only.
        positions: Position in the segment.
        learned: 1 where the model learns to predict the token.
    """

    tokens: jax.Array | np.ndarray
    segments: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    learned: jax.Array | np.ndarray

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not padding."""
        return int(np.count_nonzero(self.segments))


class Packer:
    """Fills the rows of batches with examples, in a new order for each epoch.

    Args:
        examples: Examples of at most `row_len` tokens.
        num_rows: Rows of a batch.
        row_len: Tokens of a row.
        seed: Seed of the order.
        shares_rows: Whether a row may hold several examples, first fit; else each example has a row.
    """

    def __init__(
        self, examples: Sequence[Example], num_rows: int, row_len: int, seed: int, *, shares_rows: bool
    ) -> None:
        self._examples, self._seed, self._shares_rows = examples, seed, shares_rows
        self._shape = (num_rows, row_len)
        self._ends: list[int] = []  # by epoch, rows up to its end
        self._rows_of_epoch = functools.lru_cache(maxsize=2)(self._fill)

    def batch(self, step: int) -> TrainingBatch:
        """Returns the batch of step `step`, from 0."""
        num_rows = self._shape[0]
        fields = np.zeros((4, *self._shape), np.int32)
        for row in range(num_rows):
            used = 0
            for number, index in enumerate(self._row(step * num_rows + row), 1):
                example = self._examples[index]
                here = slice(used, used + len(example.token_ids))
                fields[0, row, here], fields[1, row, here] = example.token_ids, number
                fields[2, row, here], fields[3, row, here] = np.arange(here.stop - used), example.learned
                used = here.stop
        return TrainingBatch(*fields)

    def _row(self, number: int) -> list[int]:
        """Returns the examples of row `number` of all epochs."""
        while not self._ends or self._ends[-1] <= number:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._rows_of_epoch(len(self._ends))))
        epoch = bisect.bisect_right(self._ends, number)
        return self._rows_of_epoch(epoch)[number - (self._ends[epoch - 1] if epoch else 0)]

    def _fill(self, epoch: int) -> list[list[int]]:
        """Returns the rows of an epoch as indices of examples."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._examples)).tolist()
        if not self._shares_rows:
            return [[index] for index in order]
        rows: list[list[int]] = []
        free: list[int] = []
        for index in order:
            length = len(self._examples[index].token_ids)
            row = next((row for row, room in enumerate(free) if room >= length), None)
            if row is None:
                row = len(rows)
                rows.append([])
                free.append(self._shape[1])
            rows[row].append(index)
            free[row] -= length
        return rows
