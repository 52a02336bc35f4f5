"""Splits a step plan into program calls of the per-sequence executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from torchax_serve.executors.encoder_inputs import EncoderInputs
from torchax_serve.executors.media_slots import MediaSlots
from torchax_serve.executors.per_sequence.buckets import PerSequenceBuckets, PerSequenceSpec
from torchax_serve.executors.step_inputs import SAMPLED_ON_DEVICE
from torchax_serve.scheduler import PlanRow


class StepInputs(NamedTuple):
    """Parts of the int32 array of a step, cut by `PerSequenceSpec.sizes`."""

    ids: Any  # int32[S * T]
    slots: Any  # int32[S]; num_slots for padding
    starts: Any  # int32[S], tokens in the cache
    lens: Any  # int32[S], new tokens that are no padding
    tables: Any  # int32[S * num_pages]
    rope_lens: Any  # int32[S], as in `PlanRow`; none where rotary frequencies do not depend on lengths
    source_lens: Any  # int32[S] tokens of the encoder's input; none where there is no encoder
    deltas: Any  # int32[S], positions for rotary embeddings minus positions; none where they are equal

    @classmethod
    def of(cls, numbers: Any, spec: PerSequenceSpec) -> Self:
        """Returns the parts of a traced array, or views of an array on the host."""
        cut = np.split if isinstance(numbers, np.ndarray) else jnp.split
        return cls(*cut(numbers, np.cumsum(spec.sizes)[:-1]))


class ProgramCall(NamedTuple):
    """One program call of a step."""

    spec: PerSequenceSpec
    rows: list[PlanRow]
    places: list[int]  # indices of its rows or tokens in the logits of the step


class StepSplitter:
    """Splits the rows of a plan into program calls.

    Args:
        shapes: Shapes of the programs.
        num_slots: Maximum number of rows of a step; also the slot of padding.
        sources: Encoder inputs by slot; None for a model without an encoder.
        media: Images and audio by slot.
    """

    def __init__(
        self, shapes: PerSequenceBuckets, num_slots: int, sources: EncoderInputs | None, media: MediaSlots
    ) -> None:
        self._shapes, self._num_slots, self._sources, self._media = shapes, num_slots, sources, media

    def of(self, rows: Sequence[PlanRow], ahead: int, all_logits: bool) -> list[ProgramCall]:
        """Returns the program calls of a step, and the indices of their logits in it."""
        decode = [(place, row) for place, row in enumerate(rows) if row.is_decode]
        jobs = self._decode(decode, ahead)
        return jobs + self._prefill([row for row in rows if not row.is_decode], len(decode), all_logits)

    def _prefill(self, rows: Sequence[PlanRow], place: int, all_logits: bool) -> list[ProgramCall]:
        """Returns the calls of prompts, whose logits begin at `place`.

        Prompts of equal shapes share programs.
        """
        alike: dict[PerSequenceSpec, list[tuple[PlanRow, range]]] = {}
        for row in rows:
            spec = self._shapes.chunk(row.num_tokens, row.context_len, self._source_len(row), all_logits)
            spec = dataclasses.replace(spec, media=self._media.spec_of([row]))
            places = range(place, place + (row.num_tokens if all_logits else 1))
            alike.setdefault(spec, []).append((row, places))
            place = places.stop
        jobs = []
        for one, prompts in alike.items():
            while prompts:
                spec = self._shapes.with_rows(one, len(prompts))
                taken, prompts = prompts[: spec.num_rows], prompts[spec.num_rows :]
                places_of_all = [place for _, places in taken for place in places]
                jobs.append(ProgramCall(spec, [row for row, _ in taken], places_of_all))
        return jobs

    def _decode(self, decode: list[tuple[int, PlanRow]], ahead: int) -> list[ProgramCall]:
        if not decode:
            return []
        num_tokens = max(row.context_len for _, row in decode) + ahead + 1
        spec = self._shapes.decode(len(decode), num_tokens, max(self._source_len(row) for _, row in decode))
        if isinstance(spec, PerSequenceSpec):
            spec = dataclasses.replace(spec, has_deltas=self._media.has_deltas([row for _, row in decode]))
            return [ProgramCall(spec, [row for _, row in decode], [place for place, _ in decode])]
        longest_first = sorted(decode, key=lambda entry: -entry[1].context_len)
        return self._decode(longest_first[:spec], ahead) + self._decode(longest_first[spec:], ahead)

    def _source_len(self, row: PlanRow) -> int:
        return 0 if self._sources is None else self._sources.length(row.slot)

    def num_tokens_out(self, jobs: Sequence[ProgramCall]) -> int:
        """Returns the number of rows of the logits of all tokens of `jobs` together."""
        num_rows = sum(len(job.places) for job in jobs if not job.spec.all_logits)
        num_tokens = sum(job.spec.num_tokens for job in jobs if job.spec.all_logits)
        return num_tokens + (self._shapes.rows(num_rows) if num_rows else 0)

    def numbers(self, job: ProgramCall, tables: Sequence[np.ndarray], ahead: int) -> np.ndarray:
        """Packs the int32 inputs of `job`; `tables` by group, int32[num_slots, pages_per_seq]."""
        spec = job.spec
        numbers = np.zeros(sum(spec.sizes), np.int32)
        parts = StepInputs.of(numbers, spec)
        parts.slots[:] = self._num_slots
        for index, row in enumerate(job.rows):
            begin = index * spec.num_tokens
            parts.ids[begin : begin + row.num_tokens] = SAMPLED_ON_DEVICE if row.token_ids is None else row.token_ids
            parts.slots[index] = row.slot
            parts.starts[index] = row.context_len + ahead
            parts.lens[index] = row.num_tokens
            if spec.has_rope_lens:
                parts.rope_lens[index] = row.rope_len
            if spec.has_deltas:
                parts.deltas[index] = self._media.deltas[row.slot]
            if spec.source_len:
                parts.source_lens[index] = self._source_len(row)
        if spec.num_pages and job.rows:
            table = tables[0][[row.slot for row in job.rows], : spec.num_pages]
            parts.tables.reshape(spec.num_rows, -1)[: len(job.rows), : table.shape[1]] = table
        return numbers
