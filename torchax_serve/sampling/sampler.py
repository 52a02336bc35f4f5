"""`Sampler`: the choice of tokens as the runner sees it, host's tables, device's state and programs in one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model_adapters.bridge.host_arrays import to_device
from model_adapters.program.trace_context import torch_promotion
from torchax_serve.sampling.history_sampler import HistorySampler
from torchax_serve.sampling.row_params import RowSamplingParams
from torchax_serve.sampling.sample import logprobs_of, sample
from torchax_serve.sampling.slot_params import BatchRows, SlotParams, SlotTables
from torchax_serve.sampling.types import (
    LEVELS,
    NUM_TOP_BUCKETS,
    Level,
    Logprobs,
    RowOptions,
    Sampled,
    SamplerSpec,
    SamplerState,
    SamplerTables,
)
from torchax_serve.scheduler import INVALID_TOKEN, PlanRow


def tables_bytes(num_slots: int, vocab_size: int) -> int:
    """What the tables of the level "full" take on the device, from the first request on that needs them."""
    return num_slots * vocab_size * sum(dtype.itemsize for dtype in _TABLE_DTYPES.values())


class Sampler:
    """Samples the tokens of each step.

    For each shape of the logits there are three sampling programs, one for each level, and three for log-probabilities;
    no option compiles another. Rows that depend on their history (`HistorySampler`) are the exception.
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
        self.num_traces = 0  # programs compiled so far, without those of `HistorySampler`
        self._sample = jax.jit(self._counted_sample, static_argnums=0, donate_argnums=2)
        self._logprobs = jax.jit(self._counted_logprobs, static_argnames="num_top")
        self._num_slots, self._vocab_size = num_slots, vocab_size
        self.reset()

    def reset(self) -> None:
        """Removes all requests; keeps the compiled programs."""
        self.slots = SlotParams(self._num_slots, self._vocab_size)
        self.state = SamplerState.empty(self._num_slots, self._sharding)
        self._history_samplers: dict[int, HistorySampler] = {}
        self._failures: dict[int, Exception] = {}
        self._placed: tuple[BatchRows, RowOptions] | None = None

    @property
    def last_tokens(self) -> jax.Array:
        """int32[num_slots]: what each slot has chosen last. Given up at the next `sample`: ask again for each step."""
        return self.state.last_tokens

    def assign_slot(
        self, slot: int, params: RowSamplingParams, prompt_ids: Sequence[int], outputs: Sequence[int] = ()
    ) -> None:
        """Gives `slot` to a request, before the first step with a row of it.

        Where arrays for it cannot be made, `take_failures` has the error, and the slot's row asks for nothing.

        Args:
            slot: row of the decode batch.
            params: of the request.
            prompt_ids: the prompt.
            outputs: tokens the request has been given before it was preempted.
        """
        self._history_samplers.pop(slot, None)
        try:
            self._set(slot, params, prompt_ids, outputs)
        except Exception as error:  # the others of the step go on; this row is computed and not read
            self._failures[slot] = error
            self._history_samplers.pop(slot, None)
            self.slots.set(slot, RowSamplingParams.neutral(self._vocab_size), (), ())

    def _set(self, slot: int, params: RowSamplingParams, prompt_ids: Sequence[int], outputs: Sequence[int]) -> None:
        if params.history_config is not None:
            self._history_samplers[slot] = HistorySampler(params, prompt_ids, outputs, self._sharding)
        table_row = self.slots.set(slot, params, prompt_ids, outputs)
        if table_row is not None:
            tables = self.state.tables or self._empty_tables()
            self.state = dataclasses.replace(self.state, tables=_write(tables, np.int32(slot), table_row))

    def sample(self, plan_rows: Sequence[PlanRow], logits: jax.Array, ahead: int = 0) -> Sampled:
        """Sends the choice of a token for each row to the device and returns at once.

        Args:
            plan_rows: of the plan; those that do not sample get a token that means nothing.
            logits: float[n, vocab], of each row's last token; n may exceed the number of rows.
            ahead: which of the plan's steps it is, from 0.
        """
        options, spec = self.slots.rows(plan_rows, len(logits), ahead)
        sampled = self._run(SamplerSpec(spec.level), options, logits)
        for index, row in enumerate(plan_rows):
            if row.samples_token and row.slot in self._history_samplers:
                sampled = self._store_token(sampled, self._pick(row.slot, logits, index), index, row.slot)
        if spec.logprobs:
            sampled = dataclasses.replace(sampled, logprobs=self.logprobs(logits, sampled.tokens, spec.num_top))
        return sampled

    def _pick(self, slot: int, logits: jax.Array, index: int) -> jax.Array:
        """Samples for a request that depends on its history; an error fails that request only."""
        try:
            return self._history_samplers[slot].pick(_row_of(logits, np.int32(index)))
        except Exception as error:
            self._failures.setdefault(slot, error)
            return to_device([INVALID_TOKEN], np.int32)

    def take_failures(self) -> dict[int, Exception]:
        """Returns the errors by slot since the last call, each of one request."""
        failures, self._failures = self._failures, {}
        return failures

    def fused_options(self, plan_rows: Sequence[PlanRow], num_rows: int) -> tuple[RowOptions, bool] | None:
        """Options for a program that chooses tokens itself, and whether any row draws them.

        None if a row needs log-probabilities, tables or a `HistorySampler`, which such a program does not have. The
        options are those of rows before their first token (`RowOptions.advanced` their length they are those of now),
        so that they stay on the device while the same requests decode. The program gets `take_state` the level
        "sampled" and gives its new state to `set_state`.
        """
        if self._history_samplers and any(row.slot in self._history_samplers for row in plan_rows):
            return None
        batch_rows, spec = self.slots.level_of(plan_rows, num_rows)
        if spec.logprobs or spec.level == "full":
            return None
        return self._on_device(batch_rows), spec.level == "sampled"

    def idle_options(self, num_rows: int) -> tuple[SamplerState, RowOptions]:
        """The state, to be given away, and options for `num_rows` idle rows, shaped as those of `fused_options`."""
        return self.take_state("sampled"), self._on_device(self.slots.level_of((), num_rows)[0])

    def _on_device(self, batch_rows: BatchRows) -> RowOptions:
        if self._placed is None or self._placed[0] is not batch_rows:
            self._placed = batch_rows, jax.device_put(batch_rows.at_prompt_start(), self._sharding)
        return self._placed[1]

    def take_state(self, level: Level) -> SamplerState:
        """The state as a program of this level takes it, to be given away."""
        # Where tables are not used they are not an argument either: the program is the same with and without them.
        return self.state if level == "full" else dataclasses.replace(self.state, tables=None)

    def set_state(self, state: SamplerState) -> None:
        """Takes a state back, with its tables or without."""
        self.state = state if state.tables is not None else dataclasses.replace(state, tables=self.state.tables)

    def logprobs(self, logits: jax.Array, tokens: jax.Array, num_top: int) -> Logprobs:
        """Log-probabilities of `tokens` int32[n] under `logits` [n, vocab], such as those of a prompt.

        At least `num_top` of the likeliest tokens come along: a bucket of `NUM_TOP_BUCKETS`.
        """
        bucket = next(bucket for bucket in NUM_TOP_BUCKETS if bucket >= num_top)
        return self._logprobs(logits, tokens, num_top=bucket)

    def warm_up(self, logits: jax.Array) -> None:
        """Compiles every program for logits of this shape [n, vocab], dtype and sharding; no request notices.

        The tables of the level "full" exist meanwhile (`sampler_table_bytes`).
        """
        options, _ = self.slots.rows((), len(logits))
        before = self.state.tables
        for level in LEVELS:
            if level == "full" and before is None:
                self.state = dataclasses.replace(self.state, tables=self._empty_tables())
            sampled = self._run(SamplerSpec(level), options, logits)
        if before is None:
            self.state = dataclasses.replace(self.state, tables=None)
        for bucket in NUM_TOP_BUCKETS:
            self.logprobs(logits, sampled.tokens, bucket)

    def _run(self, spec: SamplerSpec, options: RowOptions, logits: jax.Array) -> Sampled:
        sampled, state = self._sample(spec, options, self.take_state(spec.level), logits)
        self.set_state(state)
        return sampled

    def _store_token(self, sampled: Sampled, token: jax.Array, index: int, slot: int) -> Sampled:
        tokens, last_tokens = _place(sampled.tokens, self.state.last_tokens, token, np.int32(index), np.int32(slot))
        self.state = dataclasses.replace(self.state, last_tokens=last_tokens)
        return dataclasses.replace(sampled, tokens=tokens)

    def _empty_tables(self) -> SamplerTables:
        shape = (self._num_slots, self._vocab_size)
        return SamplerTables(
            **{name: jnp.zeros(shape, dtype, device=self._sharding) for name, dtype in _TABLE_DTYPES.items()}
        )

    @torch_promotion()
    def _counted_sample(
        self, spec: SamplerSpec, options: RowOptions, state: SamplerState, logits: jax.Array
    ) -> tuple[Sampled, SamplerState]:
        self.num_traces += 1
        return sample(spec, options, state, logits)

    @torch_promotion()
    def _counted_logprobs(self, logits: jax.Array, tokens: jax.Array, num_top: int) -> Logprobs:
        self.num_traces += 1
        return logprobs_of(logits, tokens, num_top=num_top)


_TABLE_DTYPES: dict[str, np.dtype] = {
    "counts": np.dtype(np.int32),
    "flags": np.dtype(np.uint8),
    "bias": np.dtype(np.float32),
}


@jax.jit
def _row_of(logits: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(logits, index, 1)


@jax.jit
def _place(
    tokens: jax.Array, last_tokens: jax.Array, token: jax.Array, index: jax.Array, slot: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return tokens.at[index].set(token[0]), last_tokens.at[slot].set(jnp.maximum(token[0], 0))


@functools.partial(jax.jit, donate_argnums=0)
def _write(tables: SamplerTables, slot: jax.Array, row: SlotTables) -> SamplerTables:
    return SamplerTables(
        counts=tables.counts.at[slot].set(row.counts),
        flags=tables.flags.at[slot].set(row.flags),
        bias=tables.bias.at[slot].set(row.bias),
    )
