"""Static batch executor: runs one request at a time.

It serves requests that no other executor takes: images, audio, models that cannot be batched. The request brings a
`SequenceSteps`, which knows how to compute its logits. So such requests have the engine's queue, sampler, deadlines and
cancellation, and nothing here depends on how they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from model_adapters.errors import InvalidArgumentError
from torchax_serve.compilation.background import CompileTask
from torchax_serve.executors.base import ExecutorLimits, MakeBitmask
from torchax_serve.executors.request_input import MediaInput, RequestInput, SequenceSteps
from torchax_serve.sampling.sampler import Sampler
from torchax_serve.sampling.types import Logprobs
from torchax_serve.scheduler import PlanRow, StepPlan


class NoPages:
    """The cache of an executor whose requests bring their own."""

    is_lost, num_bytes = False, 0

    def reset(self) -> None:
        """Does nothing: requests close their caches."""

    def release(self) -> None:
        """Does nothing: there is no memory to free."""

    def copy(self, copies: Sequence[object]) -> None:
        """Raises: there are no pages to copy."""
        raise AssertionError(f"no pages to copy, got {copies}")


class SingleRequestExecutor:
    """The `Executor` of single requests: one slot, complete prompts, no pages."""

    limits = ExecutorLimits(max_num_seqs=1, batches_prefill=False, shares_prefixes=False)
    num_substitutes = 0
    num_programs = 0  # those of the model's runtime; requests share them with `generate`

    def __init__(self) -> None:
        self.cache = NoPages()
        self._steps: SequenceSteps | None = None

    @property
    def runs_ahead(self) -> bool:
        """As `Executor.runs_ahead`."""
        return self._steps is not None and self._steps.runs_ahead

    def check(self, name: str, request_input: RequestInput) -> None:
        """Implements `Executor.check`."""
        if isinstance(request_input, tuple | np.ndarray | MediaInput):
            raise InvalidArgumentError(f"{name}: expected the steps of one request, got {type(request_input).__name__}")

    def assign(self, slot: int, request_input: RequestInput, adapter_id: int = 0) -> None:
        """Implements `Executor.assign`."""
        assert slot == 0 and not adapter_id and not isinstance(request_input, tuple | np.ndarray | MediaInput)
        self._steps = request_input

    def run(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        last_tokens: jax.Array,
        *,
        ahead: int = 0,
    ) -> jax.Array:
        """Implements `Executor.run`."""
        assert self._steps is not None and len(rows) == 1
        return self._steps.decode(last_tokens) if rows[0].is_decode else self._steps.prefill()

    def run_scored(self, *args: Any) -> tuple[Logprobs, jax.Array]:
        """Raises AssertionError: prompts' log-probabilities are refused before they come here."""
        raise AssertionError("expected no request with log-probabilities of its prompt")

    def run_decode(self, plan: StepPlan, sampler: Sampler, make_bitmask: MakeBitmask | None = None) -> None:
        """Implements `Executor.run_decode`: there is no such program."""

    def temporary_bytes(self) -> int:
        """Implements `Executor.temporary_bytes`: known to the requests only."""
        return 0

    def prepare(self, plan: StepPlan) -> None:
        """Does nothing: requests bring their steps."""

    def compile_tasks(self, sampler: Sampler) -> Iterator[CompileTask]:
        """Yields nothing: what a request runs is known when it comes."""
        yield from ()

    def warm_up(self, sampler: Sampler) -> None:
        """Does nothing: what a request runs is known when it comes."""
