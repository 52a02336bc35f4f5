"""Plans become device work: page copies, the model, the choice of tokens; and its results come back as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchax_serve.engine.cache import PagedCache
from torchax_serve.engine.packed import PackedModel
from torchax_serve.engine.request import RowRequest
from torchax_serve.engine.sampler import Sampled, SamplerState, sample
from torchax_serve.engine.slot_options import SlotOptions
from torchax_serve.scheduling import Outcome, StepPlan


@dataclasses.dataclass
class Flight:
    """A plan on the device."""

    plan: StepPlan
    sampled: list[Sampled]  # one for each of the plan's steps
    prompt_logprobs: dict[int, Any]  # by row


class ModelRunner:
    """Executes plans on a model and its cache.

    Dispatches return at once: `execute` leaves arrays that the device is still computing, `read` waits for them.
    """

    def __init__(self, model: PackedModel, cache: PagedCache, *, num_slots: int, vocab_size: int) -> None:
        self._model, self._cache = model, cache
        self._num_slots, self._vocab_size = num_slots, vocab_size
        self.reset()

    def reset(self) -> None:
        """Begins anew: an empty cache, and no request in any slot."""
        if self._cache.is_lost:
            self._cache.reset()
        self._state = SamplerState.empty(self._num_slots, self._vocab_size)
        self._slots = SlotOptions(self._num_slots, self._vocab_size)

    @property
    def cache_is_lost(self) -> bool:
        """Whether a step that failed has taken the cache with it."""
        return self._cache.is_lost

    @property
    def num_programs(self) -> int:
        """Compiled steps of the model."""
        return self._model.num_programs

    def execute(
        self, plan: StepPlan, requests: Mapping[int, RowRequest], outputs: Mapping[int, Sequence[int]]
    ) -> Flight:
        """Sends a plan to the device.

        Args:
            plan: the next one.
            requests: by slot, of the plan's rows.
            outputs: by slot, of fresh slots: tokens that the request has been given before it was preempted.
        """
        if plan.page_copies:
            self._cache.copy(plan.page_copies)
        for slot in plan.fresh_slots:
            self._state = self._slots.set(self._state, slot, requests[slot], outputs[slot])
        flight = Flight(plan, [], {})
        for ahead in range(plan.num_steps):
            logits = self._model.run(plan.rows, plan.page_tables, self._state.last_tokens, ahead=ahead)
            options, spec = self._slots.rows(plan.rows, len(logits), ahead)
            sampled, self._state = sample(spec, options, self._state, logits)
            flight.sampled.append(sampled)
        return flight

    def read(self, flight: Flight) -> np.ndarray:
        """int[num_rows, num_steps], once the device has them."""
        columns = [np.asarray(sampled.tokens)[: len(flight.plan.rows)] for sampled in flight.sampled]
        return np.stack(columns, axis=1)

    def details(self, flight: Flight, outcome: Outcome, request: RowRequest) -> dict[str, Any]:
        """What `NewTokens` has beside token ids."""
        return {}
