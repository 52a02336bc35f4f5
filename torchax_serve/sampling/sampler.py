"""`Sampler`: samples for the slots of an engine, with state on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from torchax_serve.compilation.background import CompileTask, abstract
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.sampling.history import padded_row, with_room_for
from torchax_serve.sampling.row_params import RowSamplingParams
from torchax_serve.sampling.sample import logprobs_of, sample
from torchax_serve.sampling.slot_params import BatchRows, SlotParams
from torchax_serve.sampling.types import (
    NUM_TOP_BUCKETS,
    Level,
    Logprobs,
    RowOptions,
    Sampled,
    SamplerHistory,
    SamplerSpec,
    SamplerState,
    SamplerTables,
)
from torchax_serve.scheduler import PlanRow


def tables_bytes(num_slots: int, vocab_size: int) -> int:
    """Returns the bytes of the sampler's tables, allocated once a request needs them."""
    return num_slots * vocab_size * sum(dtype.itemsize for dtype in _TABLE_DTYPES.values())


_Arrays = TypeVar("_Arrays", SamplerTables, SamplerHistory)

WARM_LEVELS: tuple[Level, ...] = ("greedy", "sampled", "penalties")
"""Levels that `Sampler.compile_tasks` has. "history", which few requests need, is compiled by the first of them."""


class Sampler:
    """Samples the tokens of each step.

    For each shape of the logits there is one sampling program for each level, and three for log-probabilities. No
    option compiles another, except at the level "history", whose programs with and without draws are compiled by the
    first step at their sizes (`SamplerHistory`). Masks are a program of their own (`mask_logits`), before these.
    """

    def __init__(self, num_slots: int, vocab_size: int, sharding: jax.sharding.Sharding | None = None) -> None:
        """Makes an empty sampler.

        Args:
            num_slots: Number of slots.
            vocab_size: Number of columns of the logits.
            sharding: Placement of the state; None: this host's first device. For logits on a mesh it is replicated
                there. Never left to JAX: an uncommitted array compiles another program than a committed one, so that
                each would be compiled twice.
        """
        self._sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        is_on_mesh = len(self._sharding.device_set) > 1
        programs = ExecutableCache(None if is_on_mesh else programs_dir(), "sampling")  # the same for every model
        self._sample = CachedFunction(programs, "sample", _sample, donate=["state"])
        self._logprobs = CachedFunction(programs, "logprobs", _logprobs)
        self._write = CachedFunction(programs, "write_slot", _write, donate=["arrays"])
        self._num_slots, self._vocab_size = num_slots, vocab_size
        self.reset()

    def reset(self) -> None:
        """Removes all requests, but not the compiled programs."""
        self.slots = SlotParams(self._num_slots, self._vocab_size)
        self.state = SamplerState.empty(self._num_slots, self._sharding)
        self._failures: dict[int, Exception] = {}
        self._placed: tuple[BatchRows, RowOptions] | None = None

    @property
    def num_traces(self) -> int:
        """Number of programs compiled or loaded so far."""
        return self._sample.num_programs + self._logprobs.num_programs

    @property
    def last_tokens(self) -> jax.Array:
        """int32[num_slots], token sampled last in each slot; donated by the next `sample`."""
        return self.state.last_tokens

    def assign_slot(
        self, slot: int, params: RowSamplingParams, prompt_ids: Sequence[int], outputs: Sequence[int] = ()
    ) -> None:
        """Assigns `slot` to a request, before the first step with a row of it.

        If arrays for it cannot be made, `take_failures` returns the error, and the slot's row asks for nothing.

        Args:
            slot: Row of the decode batch.
            params: Options of the request.
            prompt_ids: Prompt.
            outputs: Tokens that the request was given before it was preempted.
        """
        try:
            self._set(slot, params, prompt_ids, outputs)
        except Exception as error:  # the others of the step go on; this row is computed and not read
            self._failures[slot] = error
            self.slots.set(slot, RowSamplingParams.neutral(self._vocab_size), (), ())

    def _set(self, slot: int, params: RowSamplingParams, prompt_ids: Sequence[int], outputs: Sequence[int]) -> None:
        tables, history = self.slots.set(slot, params, prompt_ids, outputs)
        if tables is not None:
            of_all = self.state.tables or self._empty_tables()
            self.state = dataclasses.replace(
                self.state, tables=self._write({}, of_all, np.int32(slot), tables, spec=None)
            )
        if history is not None:
            larger = with_room_for(self.state.history, history, self._num_slots, self._sharding)
            written = self._write({}, larger, np.int32(slot), padded_row(history, larger), spec=None)
            self.state = dataclasses.replace(self.state, history=written)

    def sample(self, plan_rows: Sequence[PlanRow], logits: jax.Array, ahead: int = 0) -> Sampled:
        """Dispatches the sampling of a token for each row and returns at once.

        Args:
            plan_rows: Rows of the plan; those that do not sample get a token without meaning.
            logits: float[n, vocab], of each row's last token; n may exceed the number of rows.
            ahead: Number of steps since the first one of the plan.
        """
        options, spec = self.slots.rows(plan_rows, len(logits), ahead)
        sampled = self._run(SamplerSpec(spec.level, spec.draws), options, logits)
        if spec.logprobs:
            sampled = dataclasses.replace(sampled, logprobs=self.logprobs(logits, sampled.tokens, spec.num_top))
        return sampled

    def take_failures(self) -> dict[int, Exception]:
        """Returns the errors by slot since the last call, each of one request."""
        failures, self._failures = self._failures, {}
        return failures

    def fused_options(self, plan_rows: Sequence[PlanRow], num_rows: int) -> tuple[RowOptions, bool] | None:
        """Returns options for a program with sampling, and whether any row draws tokens.

        None if a row needs log-probabilities, tables or a history, which such a program does not have. The
        options are those of rows before their first token (`RowOptions.advanced` their length they are those of now),
        so that they stay on the device while the same requests decode. The program gets `take_state` the level
        "sampled" and gives its new state to `set_state`.
        """
        batch_rows, spec = self.slots.level_of(plan_rows, num_rows)
        if spec.logprobs or spec.level not in ("greedy", "sampled"):
            return None
        return self._on_device(batch_rows), spec.level == "sampled"

    def _on_device(self, batch_rows: BatchRows) -> RowOptions:
        if self._placed is None or self._placed[0] is not batch_rows:
            self._placed = batch_rows, jax.device_put(batch_rows.at_prompt_start(), self._sharding)
        return self._placed[1]

    def take_state(self, level: Level) -> SamplerState:
        """Returns the state as a program of this level takes it, to be donated."""
        # What a level does not use is no argument of it: the program is the same with and without it.
        tables = self.state.tables if level in ("penalties", "history") else None
        return dataclasses.replace(
            self.state, tables=tables, history=self.state.history if level == "history" else None
        )

    def set_state(self, state: SamplerState) -> None:
        """Sets the state that a program returned, with or without tables and history."""
        self.state = dataclasses.replace(
            state, tables=state.tables or self.state.tables, history=state.history or self.state.history
        )

    def logprobs(self, logits: jax.Array, tokens: jax.Array, num_top: int) -> Logprobs:
        """Computes log-probabilities of `tokens` int32[n] by `logits` [n, vocab].

        The result has at least `num_top` of the likeliest tokens: a bucket of `NUM_TOP_BUCKETS`.
        """
        bucket = next(bucket for bucket in NUM_TOP_BUCKETS if bucket >= num_top)
        return self._logprobs({}, logits, tokens, spec=bucket)

    def compile_tasks(self, like: jax.ShapeDtypeStruct | jax.Array) -> Iterator[CompileTask]:
        """Yields every program for logits [n, vocab] of this shape and dtype; any thread may compile them."""
        logits = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=self._sharding)
        options = abstract(SlotParams(self._num_slots, self._vocab_size).rows((), logits.shape[0])[0])
        for level in WARM_LEVELS:
            state = self._abstract_state(has_tables=level == "penalties")
            task = functools.partial(self._sample.compiled, {}, options, state, logits, spec=SamplerSpec(level))
            yield CompileTask(("sample", level, logits.shape, logits.dtype), task)
        tables = self._abstract_state(has_tables=True).tables
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tables)
        slot = jax.ShapeDtypeStruct((), np.int32)
        yield CompileTask("write", functools.partial(self._write.compiled, {}, tables, slot, row, spec=None))
        tokens = jax.ShapeDtypeStruct(logits.shape[:1], np.int32, sharding=self._sharding)
        for bucket in NUM_TOP_BUCKETS:
            task = functools.partial(self._logprobs.compiled, {}, logits, tokens, spec=bucket)
            yield CompileTask(("logprobs", bucket, logits.shape, logits.dtype), task)

    def _abstract_state(self, has_tables: bool) -> SamplerState:
        """Returns the shapes of the state at levels without a history."""

        def array(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct((self._num_slots, *shape), dtype, sharding=self._sharding)

        tables = SamplerTables(**{name: array(dtype, self._vocab_size) for name, dtype in _TABLE_DTYPES.items()})
        return SamplerState(array(np.int32), tables if has_tables else None)

    def abstract_fused(self, num_rows: int) -> tuple[SamplerState, RowOptions]:
        """Returns the shapes of the state and options that a program with sampling takes (`fused_options`)."""
        options = SlotParams(self._num_slots, self._vocab_size).rows((), num_rows)[0]
        placed = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding) for x in (options.ints, options.floats)
        ]
        return self._abstract_state(has_tables=False), RowOptions(*placed)  # type: ignore[arg-type]

    def _run(self, spec: SamplerSpec, options: RowOptions, logits: jax.Array) -> Sampled:
        sampled, state = self._sample({}, options, self.take_state(spec.level), logits, spec=spec)
        self.set_state(state)
        return sampled

    def _empty_tables(self) -> SamplerTables:
        shape = (self._num_slots, self._vocab_size)
        zeros = {name: np.zeros(shape, dtype) for name, dtype in _TABLE_DTYPES.items()}
        return SamplerTables(**jax.device_put(zeros, self._sharding))


def _sample(
    weights: Any, options: RowOptions, state: SamplerState, logits: jax.Array, spec: SamplerSpec
) -> tuple[Sampled, SamplerState]:
    """Samples, as a function with the arguments of a `CachedFunction`; there are no weights."""
    return sample(spec, options, state, logits)


def _logprobs(weights: Any, logits: jax.Array, tokens: jax.Array, spec: int) -> Logprobs:
    """Computes log-probabilities, and `spec` of the likeliest tokens; there are no weights."""
    return logprobs_of(logits, tokens, num_top=spec)


_TABLE_DTYPES: dict[str, np.dtype] = {
    "counts": np.dtype(np.int32),
    "flags": np.dtype(np.uint8),
    "bias": np.dtype(np.float32),
}


def _write(weights: Any, arrays: _Arrays, slot: jax.Array, row: _Arrays, spec: None) -> _Arrays:
    """Returns the arrays of all slots with `row` at `slot`; there are no weights."""
    return jax.tree.map(lambda array, of_row: array.at[slot].set(of_row), arrays, row)
