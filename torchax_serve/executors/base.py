"""The executor protocol: the one interface to the ways to run a model.

`PackedExecutor` runs all rows of a step as one ragged batch, `PerSequenceExecutor` one forward per request,
`SingleRequestExecutor` one request at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.kv_pool import LARGEST
from torchax_serve.compilation.background import CompileTask
from torchax_serve.executors.request_input import RequestInput
from torchax_serve.executors.speculation.verified_tokens import VerifiedTokens
from torchax_serve.kv_cache.pools import PagedCache
from torchax_serve.sampling.sampler import Sampler
from torchax_serve.sampling.types import Logprobs
from torchax_serve.scheduler import PageCopy, PlanRow, StepPlan

if TYPE_CHECKING:
    from model_adapters.sharding.model_sharding import ModelSharding


MakeBitmask = Callable[[int], np.ndarray]
"""Computes the bitmask of so many rows, as `Sampler.sample` takes it; called while the device computes their logits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorLimits:
    """Limits of an executor; the scheduler's configuration follows from them.

    Attributes:
        max_num_seqs: Number of slots; may be less than `EngineOptions.max_num_seqs`.
        max_encoder_len: Maximum number of encoder positions of a request; None for a model without an encoder.
        chunk_sizes: Only sizes of prefill chunks, in tokens, descending to 1; None: any size.
        batches_prefill: Whether a step may have several prefill rows.
        shares_prefixes: Whether pages and snapshots hold the complete state of a prefix, so that requests can share it.
        num_snapshots: Snapshots of recurrent states, with snapshot 0, which is not used; 0: no layer has a state.
        max_num_steps: Maximum number of decode steps with sampling in one dispatch; 0: no `run_decode`.
        token_buckets: Numbers of tokens up to which a step with prefill rows costs the same, ascending; empty: none.
        sees_ahead: Whether tokens of an image may see later ones of it.
    """

    max_num_seqs: int
    max_encoder_len: int | None = None
    chunk_sizes: tuple[int, ...] | None = None
    batches_prefill: bool = True
    shares_prefixes: bool = True
    num_snapshots: int = 0
    max_num_steps: int = 0
    token_buckets: tuple[int, ...] = ()
    sees_ahead: bool = False


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """A step of an executor with abstract arguments, to be traced and compiled.

    Attributes:
        name: ``decode``, ``verify`` or ``prefill``.
        num_tokens: Number of tokens computed in the step.
        num_rows: Number of requests in the step.
        context_len: Number of tokens of each request, those of the step included.
        num_prompts: Number of prompts whose tokens the step computes; 0 for a decode or verify step.
        function: Function ``f(weights, *args)`` to trace; its first result is logits.
        args: Abstract arguments.
        donated: Indices of donated `args`.
    """

    name: str
    num_tokens: int
    num_rows: int
    context_len: int
    num_prompts: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]


class ExecutorCache(Protocol):
    """Interface of an executor's cache for `ModelRunner`."""

    @property
    def is_lost(self) -> bool:
        """Whether a failed step has deleted the donated arrays."""

    @property
    def num_bytes(self) -> int:
        """Bytes of pages and states."""

    def reset(self) -> None:
        """Empties the cache."""

    def release(self) -> None:
        """Frees the memory of the cache until `reset`."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages."""


class Executor(Protocol):
    """Runs step plans of one model on one cache. Used by the engine's thread only.

    Attributes:
        limits: What the executor can run.
        cache: Page pools and states by slot, replaced by each step.
        runs_ahead: Whether a step may be dispatched before the tokens of the one before it have been read.
        num_substitutes: Number of dispatches by a larger program than needed, while another thread compiled that one.
    """

    limits: ExecutorLimits

    @property
    def cache(self) -> ExecutorCache:
        """Page pools and states by slot."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be dispatched before the tokens of the last one are read."""

    @property
    def num_programs(self) -> int:
        """Number of compiled steps."""

    @property
    def num_substitutes(self) -> int:
        """Number of dispatches by a larger program than needed."""

    def check(self, name: str, request_input: RequestInput) -> None:
        """Raises InvalidArgumentError, naming `name`, if the model cannot take `request_input`."""

    def assign(self, slot: int, request_input: RequestInput, adapter_id: int = 0) -> None:
        """Assigns `slot` to a request with this input and adapter, before its first step."""

    def run(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        last_tokens: jax.Array,
        *,
        ahead: int = 0,
    ) -> jax.Array:
        """Dispatches one step and returns its logits [num_slots, vocab], those of `rows` first.

        The method does not wait for them.

        Args:
            rows: Rows of a plan.
            tables: Page tables by group, int32[num_slots, pages_per_seq].
            last_tokens: Token sampled last in each slot, int32[num_slots].
            ahead: Number of decode steps since the first step of the plan.
        """

    def run_scored(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        sampler: Sampler,
        following: np.ndarray,
        num_top: int,
    ) -> tuple[Logprobs, jax.Array]:
        """Dispatches a step with log-probabilities of given tokens; does not wait for them.

        Args:
            rows: Rows of a plan.
            tables: Page tables by group, int32[num_slots, pages_per_seq].
            sampler: Sampler of the slots.
            following: Token that follows each token of the rows, int32[num_tokens].
            num_top: Number of the likeliest tokens that are read.

        Returns:
            Log-probabilities of `following`, and logits [num_slots, vocab] as those of `run`.
        """

    def run_decode(
        self, plan: StepPlan, sampler: Sampler, make_bitmask: MakeBitmask | None = None
    ) -> jax.Array | VerifiedTokens | None:
        """Dispatches all steps of a decode plan; `make_bitmask` is for rows of a plan with drafts.

        Returns tokens int32[>= num_steps, S], or what a plan with drafts brings, which only an executor gets that was
        made with options of speculation. None: nothing was dispatched, because a row needs more than tokens
        (log-probabilities, penalties), or because the executor has no such program (`ExecutorLimits.max_num_steps`
        is 0).
        """

    def temporary_bytes(self) -> int:
        """Returns the temporary bytes of the largest step, by XLA's memory analysis."""

    def prepare(self, plan: StepPlan) -> None:
        """Has other threads compile what the requests of a plan with prefill rows need after it."""

    def compile_tasks(self, sampler: Sampler) -> Iterator[CompileTask]:
        """Yields the programs of mixed traffic, the sampler's included; any threads may run them."""

    def warm_up(self, sampler: Sampler) -> None:
        """Compiles, on the engine's thread, what `compile_tasks` leaves."""


class PagedExecutor(Executor, Protocol):
    """An executor whose requests share page pools."""

    @property
    def cache(self) -> PagedCache:
        """Page pools and states by slot."""

    def abstract_steps(self, prefill_lens: Sequence[int]) -> Iterator[AbstractStep]:
        """Yields the largest decode step, then a prefill step for each of `prefill_lens`, in tokens.

        A packed executor that speculates yields its largest verify step between them, without who drafts.
        Weights and cache may be shapes without values; nothing is computed.
        """


@dataclasses.dataclass(frozen=True)
class ExecutorChoice:
    """The executor of a model, and why it is this one.

    Attributes:
        executor: The executor.
        fallback_reason: Why the model does not run packed; None if it does.
        sampler_table_bytes: Bytes of the sampler's tables, which are not part of the cache.
    """

    executor: PagedExecutor
    fallback_reason: str | None = None
    sampler_table_bytes: int = 0

    @property
    def is_packed(self) -> bool:
        """Whether the model runs packed."""
        return self.fallback_reason is None

    def __str__(self) -> str:
        """Returns one line for people: sizes of the cache, and the reason of a fallback."""
        cache = self.executor.cache
        plan = cache.plan
        if plan.groups:
            pages = " + ".join(str(group.num_pages - 1) for group in plan.groups)
            in_8_bits = next((f" in {shape.dtype}" for shape in plan.shapes if str(shape.dtype) in LARGEST), "")
            at_once = plan.num_full_length_requests(plan.max_len)
            fit = "1 request fits" if at_once == 1 else f"{at_once} requests fit"
            line = (
                f"cache of {plan.num_bytes / 1e6:.1f} MB{in_8_bits}: {pages} pages of {plan.page_size} tokens, room "
                f"for {plan.num_tokens} tokens; {fit} at once, each of up to {plan.max_len} tokens"
            )
        else:
            line = f"no pages: each request has a state of one size; requests of at most {plan.max_len} tokens"
        line += f"; {self.sampler_table_bytes / 1e6:.1f} MB for the sampler's tables"
        if cache.state_bytes:
            line += f"; {cache.state_bytes / 1e6:.1f} MB for the states of requests"
            kept = self.executor.limits.num_snapshots - 1
            line += f" and of {kept} prefixes" if kept > 0 else ""
        return line if self.is_packed else f"{line}; per-sequence, not packed: {self.fallback_reason}"


def abstract_ints(sharding: ModelSharding | None, *shape: int) -> Any:
    """Returns an abstract int32 array, replicated on every device of the model."""
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=None if sharding is None else sharding.replicated())


def refuse_encoder_input(name: str, request_input: RequestInput) -> None:
    """Raises InvalidArgumentError, naming `name`, for any input of an encoder."""
    if not (isinstance(request_input, tuple) and not request_input):
        raise InvalidArgumentError(f"{name}: expected no input of an encoder, which this model has not, got one")
