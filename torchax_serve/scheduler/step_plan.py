"""`StepPlan`: the work of one device step in integers; `RowResult`: the result of one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from torchax_serve.outputs import FinishReason
from torchax_serve.scheduler.host_pages import PageTransfer
from torchax_serve.scheduler.page_pool import PageCopy
from torchax_serve.scheduler.state_snapshots import StateRows
from torchax_serve.scheduler.types import RequestId


class PlanRow(NamedTuple):
    """Consecutive tokens of one request.

    Token ``i`` has position ``context_len + i``. Keys and values of the positions before `context_len` are in the
    cache, or are written by a plan in flight.
    """

    request_id: RequestId
    slot: int
    context_len: int  # tokens of the request in front of the row; the position of its first token
    num_tokens: int
    token_ids: tuple[int, ...] | None  # None: a decode row, its token is the slot's last sampled one, on the device
    samples_token: bool  # whether a token is sampled after the row's last one
    rope_len: int = 0  # a length that rotary frequencies of its tokens are at least for; 0: each token's own
    prompt_len: int = 0  # positions before it hold tokens that were given, those from it on what was generated
    states: StateRows | None = None  # snapshots of recurrent states that it reads and writes

    @property
    def is_decode(self) -> bool:
        """Whether the row computes the slot's last sampled token."""
        return self.token_ids is None


class DecodeBatch(Sequence[PlanRow]):
    """Rows of a plan in which every request decodes, as arrays; a `PlanRow` is made on access.

    Args:
        request_ids: Request of each row.
        slots: Slot of each row, int32[n].
        starts: Position of each row's token (`PlanRow.context_len`), int32[n].
    """

    __slots__ = ("request_ids", "slots", "starts")

    def __init__(self, request_ids: Sequence[RequestId], slots: np.ndarray, starts: np.ndarray) -> None:
        self.request_ids, self.slots, self.starts = request_ids, slots, starts

    def __len__(self) -> int:
        return len(self.request_ids)

    @overload
    def __getitem__(self, index: int) -> PlanRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PlanRow, ...]: ...
    def __getitem__(self, index: int | slice) -> PlanRow | tuple[PlanRow, ...]:
        if isinstance(index, slice):
            return tuple([self[i] for i in range(*index.indices(len(self)))])
        return PlanRow(self.request_ids[index], int(self.slots[index]), int(self.starts[index]), 1, None, True)

    def __iter__(self) -> Iterator[PlanRow]:
        for request_id, slot, start in zip(self.request_ids, self.slots.tolist(), self.starts.tolist(), strict=True):
            yield PlanRow(request_id, slot, start, 1, None, True)


@dataclasses.dataclass(frozen=True, eq=False)
class DraftRows:
    """Rows of verify steps, each of which computes one token and its drafts.

    Attributes:
        ends: First position of each row that no step computes: it has no page, or no token is wanted behind it.
        most: Most drafts of a step of each row.
        reserved: Most tokens that each row can get from the plan.
        histories: Tokens of each row, prompt and answer; None: those on the device are theirs.
        needs_sampler: Rows without drafts whose token follows from more than logits, such as penalties or masks: it is
            sampled as in other plans, from the logits of the step. A plan with such a row has one step.
    """

    ends: Sequence[int]
    most: Sequence[int]
    reserved: Sequence[int]
    histories: Sequence[Sequence[int]] | None
    needs_sampler: Sequence[bool]


class DraftResult(NamedTuple):
    """What verify steps have brought."""

    tokens: Sequence[tuple[int, ...]]  # by row, accepted drafts and the token behind them, of all steps
    num_steps: int  # that had anything to compute
    num_drafted: int
    num_accepted: int  # of the drafts
    num_drafted_rows: int = 0  # rows with drafts, those of each step counted


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """Holds what the device computes next, in integers: `num_steps` forwards.

    In this order: do `page_transfers` one after the other; do `page_copies` (all sources as they are before the first
    copy); initialise the state of `fresh_slots`; compute the rows, `num_steps` times where that is above 1, each time
    with the token sampled before.
    """

    step: int
    rows: Sequence[PlanRow]  # decode rows first
    num_decode: int  # decode rows
    num_steps: int  # decode steps; above 1 only if every row decodes
    fresh_slots: tuple[int, ...]  # slots assigned since the last plan
    page_copies: tuple[PageCopy, ...]
    page_tables: tuple[np.ndarray, ...]
    """A table for each group, int32[num_slots, pages_per_seq]: page ids by slot and by position // page_size.

    Not a copy, and read-only: valid until the scheduler is called again, so copy what is kept. Entries are 0, the null
    page, behind the window, beyond what the slot's request has been given, and for empty slots.
    """
    page_transfers: tuple[PageTransfer, ...] = ()  # between device and host
    drafts: DraftRows | None = (
        None  # of verify steps: where rows begin is known on the device, `context_len` is a bound
    )

    @property
    def decode_rows(self) -> Sequence[PlanRow]:
        """The rows that compute their slot's last sampled token."""
        return self.rows[: self.num_decode]

    @property
    def prefill_rows(self) -> Sequence[PlanRow]:
        """The rows with their own token ids."""
        return self.rows[self.num_decode :]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of all prefill rows together."""
        return sum(row.num_tokens for row in self.prefill_rows)


class RowResult(NamedTuple):
    """The result of a step for one request."""

    request_id: RequestId
    row: int | None  # index into the plan's rows; None if the request ended outside of one
    token_ids: tuple[int, ...]  # accepted tokens, an end-of-sequence token among them; a prefix of what was sampled
    finish_reason: FinishReason | None  # None: the request goes on
