"""Execution of step plans on the device: page copies, the model, sampling, result reads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from torchax_serve.compilation.background import BackgroundCompiler, CompileTask, compile_all
from torchax_serve.engine.adapters import Adapters, AdapterUse
from torchax_serve.executors.base import Executor
from torchax_serve.executors.request_input import SpanLimits
from torchax_serve.executors.speculation.speculative_decode import read_drafts
from torchax_serve.executors.speculation.verified_tokens import VerifiedTokens
from torchax_serve.kv_cache.host_pools import HostPools
from torchax_serve.outputs import TokenLogprobs
from torchax_serve.sampling.sampler import Sampler
from torchax_serve.sampling.token_masks import ALL_TOKENS, TokenMasks, num_words
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour
from torchax_serve.sampling.types import Logprobs, Sampled, columns_for
from torchax_serve.sampling_params import MAX_LOGPROBS
from torchax_serve.scheduler import DraftResult, PlanRow, Request, RequestId, SchedulerConfig, StepPlan
from torchax_serve.scheduler.request import RequestState

if TYPE_CHECKING:
    from model_adapters.loading.progress import Advance, Progress


NO_ADAPTERS = "the model was served without adapters; serve(model, adapters={name: path})"
"""Why a request cannot have an adapter, on an engine of a model without any."""


class MaskedRequests:
    """Token masks by request; used by the engine's thread only.

    Args:
        vocab_size: Number of columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = num_words(vocab_size)
        self._masks: dict[RequestId, TokenMasks] = {}

    def add(self, request_id: RequestId, masks: TokenMasks | None) -> None:
        """Adds a request; None for one without masks."""
        if masks is not None:
            self._masks[request_id] = masks

    def drop_done(self, find: Callable[[RequestId], RequestState | None]) -> None:
        """Drops the masks of requests of which every token may follow from now on.

        Args:
            find: Returns the state of a request that has not ended, which waits for its tokens no more.
        """
        for request_id in [each for each, masks in self._masks.items() if getattr(masks, "is_done", False)]:
            del self._masks[request_id]
            if (state := find(request_id)) is not None:
                state.waits_for_tokens = False

    def of(
        self, plan: StepPlan, find: Callable[[RequestId], RequestState | None], read_tokens: Callable[[], None]
    ) -> PlanMasks | None:
        """Returns the masks of a plan's rows; None if no row has one.

        Args:
            plan: The plan; it has one step if a row is masked.
            find: Returns the state of a request that has not ended.
            read_tokens: Reads the tokens of all steps in flight.
        """
        if not self._masks:
            return None
        self._masks = {request_id: masks for request_id, masks in self._masks.items() if find(request_id) is not None}
        masked: list[tuple[int, int, TokenMasks, RequestState]] = []
        for index, row in enumerate(plan.rows):
            masks, state = self._masks.get(row.request_id), find(row.request_id)
            if masks is not None and state is not None and row.samples_token:
                masked.append((index, row.slot, masks, state))
        return PlanMasks(self._num_words, masked, read_tokens) if masked else None


class PlanMasks:
    """Masks of the rows of one plan, not computed yet.

    Args:
        num_words: Words of a row of the bitmask.
        masked: Index, slot, masks and state of each masked row.
        read_tokens: Reads the tokens of all steps in flight.
    """

    def __init__(
        self,
        num_words: int,
        masked: Sequence[tuple[int, int, TokenMasks, RequestState]],
        read_tokens: Callable[[], None],
    ) -> None:
        self._num_words, self._masked, self._read_tokens = num_words, masked, read_tokens

    def bitmask(self, num_rows: int, failures: dict[int, Exception]) -> np.ndarray:
        """Computes the bitmask of a step, int32[num_rows, ceil(vocab / 32)].

        The device computes the logits of the plan meanwhile: it needs the tokens before, and not their values here.

        Args:
            num_rows: Rows of the logits; those behind the plan's have no masks.
            failures: Takes the errors of masks, by slot.

        Raises:
            Exception: A step in flight has failed.
        """
        self._read_tokens()
        bitmask = np.full((num_rows, self._num_words), ALL_TOKENS)
        for index, slot, masks, state in self._masked:
            if state.finish_reason is not None:
                continue  # with a token that has just been read: the row's next one is not delivered
            try:
                masks.fill(bitmask[index], state.output_ids)
            except Exception as error:  # of this request
                bitmask[index] = ALL_TOKENS
                failures[slot] = error
        return bitmask


@dataclasses.dataclass
class InFlightStep:
    """A plan that was dispatched, its times, and its results on the device.

    The scheduler knows the same step by its plan alone.

    Attributes:
        plan: The step plan.
        sampled: Results of each step of the plan.
        tokens: int32[>= num_steps, S] of decode steps in one dispatch, or the results of a plan with drafts, in place
            of `sampled`.
        prompt_logprobs: Log-probabilities of all prompt tokens of the step; None if not requested.
        failures: Errors by slot, each of one request.
        weights_version: Version of the weights that the step was computed with.
        sent_s: When its first program was sent, in seconds on the clock `time.monotonic`.
        expected_s: Expected seconds of the device, measured on earlier plans; 0: unknown.
        is_timed: Whether its time is that of such steps: no program was compiled for it, or stood in.
    """

    plan: StepPlan
    sampled: list[Sampled] = dataclasses.field(default_factory=list)
    tokens: jax.Array | VerifiedTokens | None = None
    prompt_logprobs: Logprobs | None = None
    failures: dict[int, Exception] = dataclasses.field(default_factory=dict)
    weights_version: int = 0
    sent_s: float = 0.0
    expected_s: float = 0.0
    is_timed: bool = True

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities of any row were requested."""
        if isinstance(self.tokens, VerifiedTokens):
            return self.tokens.has_logprobs
        return any(sampled.logprobs is not None for sampled in self.sampled)

    def is_complete(self) -> bool:
        """Returns whether the device has computed its tokens; does not wait."""
        tokens: Any = self.sampled[-1].tokens if self.tokens is None else self.tokens
        return all(leaf.is_ready() for leaf in jax.tree.leaves(tokens) if hasattr(leaf, "is_ready"))


class ModelRunner:
    """Runner of plans with the executor of a model and a sampler.

    `execute` returns at once with arrays that the device is still computing; `read` waits for them.

    Args:
        executor: Runs the model's steps.
        vocab_size: Number of columns of the logits.
        max_model_len: Maximum number of tokens of a request; None: any.
        background: Compiles programs of the model in another thread; None: none does.
        rules: Release of transformers whose processors are followed; None: the installed one.
        host_pools: Pages in host memory; None: none are.
        adapters: Adapters that requests can name, or why there are none.
        max_logprobs: Most top log-probabilities of a request; -1: those of the whole vocabulary.

    Attributes:
        weights_version: Version of the weights of the steps to come.
        vocab_size, max_logprobs: As given.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        vocab_size: int,
        max_model_len: int | None = None,
        background: BackgroundCompiler | None = None,
        rules: TransformersBehaviour | None = None,
        host_pools: HostPools | None = None,
        adapters: Adapters | str = NO_ADAPTERS,
        max_logprobs: int = MAX_LOGPROBS,
    ) -> None:
        self._host_pools = host_pools
        self._background, self._adapters = background, adapters
        self.weights_version = 0
        self.vocab_size = vocab_size
        self._executor, self._cache = executor, executor.cache
        self.max_logprobs, num_top = max_logprobs, columns_for(max_logprobs, vocab_size)
        self._sampler = Sampler(
            executor.limits.max_num_seqs, vocab_size, max_len=max_model_len, rules=rules, num_top=num_top
        )

    def reset(self) -> None:
        """Empties the cache and all slots."""
        self._cache.reset()
        self._sampler.reset()
        if self._host_pools is not None:
            self._host_pools.reset()

    def release_cache(self) -> None:
        """Frees the memory of the cache until `reset`; no step may run meanwhile."""
        self._cache.release()

    def hold_tracing(self) -> None:
        """Lets no other thread trace until the next `execute`, while the model may be changed."""
        if self._background is not None:
            self._background.hold_tracing()

    @property
    def cache_bytes(self) -> int:
        """Bytes of pages and states on the device."""
        return self._cache.num_bytes

    @property
    def cache_is_lost(self) -> bool:
        """Whether a failed step has deleted the donated cache or sampler state."""
        return self._cache.is_lost or self._sampler.last_tokens.is_deleted()

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be dispatched before the tokens of the last one are read."""
        return self._executor.runs_ahead

    @property
    def num_programs(self) -> int:
        """Compiled steps of the model and of the sampler."""
        return self._executor.num_programs + self._sampler.num_programs

    @property
    def num_untimed(self) -> int:
        """Programs compiled, plus steps run by a larger program than needed; neither is timed."""
        return self.num_programs + self._executor.num_substitutes

    @property
    def max_encoder_len(self) -> int | None:
        """Number of tokens that a request may send to an encoder; None if the model has none."""
        return self._executor.limits.max_encoder_len

    def span_limits(self, config: SchedulerConfig) -> SpanLimits:
        """Returns the limits of images with bidirectional attention under this scheduler."""
        return SpanLimits(self._executor.limits.sees_ahead, config.max_span_len, config.shortest_window)

    def adapter_use(self, name: str | None) -> AdapterUse | None:
        """Returns the use of the adapter that a request names; None for none.

        Raises:
            InvalidArgumentError: no adapter of that name is loaded.
        """
        if name is None:
            return None
        if isinstance(self._adapters, str):
            raise InvalidArgumentError(f"adapter: expected None, got {name!r}: {self._adapters}")
        return self._adapters.use(name)

    def validate(self, name: str, request: Request) -> None:
        """Raises InvalidArgumentError, naming `name`, if the executor does not accept `request`."""
        self._executor.check(name, request.request_input)

    def compile_tasks(self) -> Iterator[CompileTask]:
        """Yields the programs that mixed traffic can meet; any threads may compile them."""
        return self._executor.compile_tasks(self._sampler)

    def compile_in_background(self) -> None:
        """Compiles what `compile_tasks` yields, behind requests; nothing on several hosts."""
        if self._background is not None:
            for task in self.compile_tasks():
                self._background.submit(task)

    def close(self) -> None:
        """Drops the programs that wait to be compiled; they hold weights."""
        if self._background is not None:
            self._background.drop()

    def warm_up(self) -> None:
        """Compiles, on the engine's thread, what `compile_tasks` leaves."""
        self._executor.warm_up(self._sampler)
        if self._host_pools is not None:
            self._host_pools.warm_up()

    def execute(
        self,
        plan: StepPlan,
        requests: Mapping[int, Request],
        outputs: Mapping[int, Sequence[int]],
        masks: PlanMasks | None = None,
    ) -> InFlightStep:
        """Sends a plan to the device.

        Args:
            plan: the next one.
            requests: by slot, of the plan's prefill rows.
            outputs: by slot, of fresh slots: tokens that the request has been given before it was preempted.
            masks: tokens that rows may sample; None: all. Such a plan has one step. They are computed while the device
                computes the logits.
        """
        if self._background is not None:
            self._background.allow_tracing()
        if plan.page_transfers and self._host_pools is not None:
            self._host_pools.transfer(plan.page_transfers)
        if plan.page_copies:
            self._cache.copy(plan.page_copies)
        for slot in plan.fresh_slots:
            own = requests[slot]
            self._sampler.assign_slot(slot, own.params, own.prompt_ids, outputs[slot], own.max_new_tokens)
            self._executor.assign(slot, own.request_input, own.adapter_id)
        if plan.prefill_rows:
            self._executor.prepare(plan)
        step = InFlightStep(plan, weights_version=self.weights_version)
        failures: dict[int, Exception] = {}
        make_bitmask = None if masks is None else functools.partial(masks.bitmask, failures=failures)
        # Decode rows that need no more than tokens are one dispatch for all their steps, and plans with drafts are the
        # executor's. All other steps are two dispatches: logits, with log-probabilities of prompts where they are asked
        # for, then sampling.
        is_fused = masks is None and not plan.prefill_rows and self._executor.limits.max_num_steps
        if is_fused or plan.drafts is not None:
            step.tokens, step.failures = self._executor.run_decode(plan, self._sampler, make_bitmask), failures
            if step.tokens is not None:
                return step
        tops = [requests[row.slot].params.prompt_logprobs for row in plan.prefill_rows]
        num_top = max((top for top in tops if top is not None), default=None)
        for ahead in range(plan.num_steps):
            if num_top is None:
                logits = self._executor.run(plan.rows, plan.page_tables, self._sampler.last_tokens, ahead=ahead)
            else:
                following = _following_tokens(plan.rows, requests)
                step.prompt_logprobs, logits = self._executor.run_scored(
                    plan.rows, plan.page_tables, self._sampler, following, num_top
                )
            bitmask = None if make_bitmask is None else make_bitmask(len(logits))
            step.sampled.append(self._sampler.sample(plan.rows, logits, ahead, bitmask))
        step.failures = self._sampler.take_failures() | failures
        return step

    def read(self, step: InFlightStep) -> np.ndarray | DraftResult:
        """Returns the sampled tokens, int[num_rows, num_steps], or those of verify steps."""
        if isinstance(step.tokens, VerifiedTokens):
            return read_drafts(np.asarray(step.tokens.results)[: step.plan.num_steps], len(step.plan.rows))
        if step.tokens is not None:
            return np.asarray(step.tokens)[: step.plan.num_steps, : len(step.plan.rows)].T
        columns = [np.asarray(sampled.tokens)[: len(step.plan.rows)] for sampled in step.sampled]
        return np.stack(columns, axis=1)

    def logprobs(
        self, step: InFlightStep, row: int, num_tokens: int, num_top: int, *, of_scores: bool = False
    ) -> tuple[TokenLogprobs, ...]:
        """Returns log-probabilities of the first `num_tokens` sampled tokens of `row`.

        Each has the `num_top` likeliest tokens, too. With `of_scores` they are those of the processed scores.
        """
        found: list[tuple[Logprobs, int | tuple[int, ...], int]] = []
        if isinstance(step.tokens, VerifiedTokens):
            found += step.tokens.logprobs_of(row)
        for sampled in step.sampled:
            logprobs = sampled.logprobs
            assert logprobs is not None
            if of_scores:
                assert logprobs.processed is not None, "the row has a history"
                logprobs = dataclasses.replace(logprobs, chosen=logprobs.processed)
            found.append((logprobs, row, int(np.asarray(sampled.tokens)[row])))
        return tuple(_token(*each, num_top, step.weights_version) for each in found[:num_tokens])

    def prompt_logprobs(self, step: InFlightStep, row: int, request: Request) -> dict[int, TokenLogprobs]:
        """Returns the log-probabilities of a prefill row, by position in the prompt of `request`."""
        assert step.prompt_logprobs is not None
        rows = step.plan.rows
        begin = sum(each.num_tokens for each in rows[:row])
        num_top = request.params.prompt_logprobs or 0
        return {
            rows[row].context_len + i + 1: _token(step.prompt_logprobs, begin + i, token, num_top, step.weights_version)
            for i, token in enumerate(_following(rows[row], request))
        }


def _following_tokens(rows: Sequence[PlanRow], requests: Mapping[int, Request]) -> np.ndarray:
    """Returns the prompt token behind each token of `rows`, int32[num_tokens]; 0 for none."""
    ends = np.cumsum([row.num_tokens for row in rows])
    following = np.zeros(ends[-1], np.int32)
    for row, end in zip(rows, ends, strict=True):
        ids = () if row.is_decode else _following(row, requests[row.slot])
        following[end - row.num_tokens : end - row.num_tokens + len(ids)] = ids
    return following


def _following(row: PlanRow, request: Request) -> Sequence[int]:
    """Returns the prompt tokens that follow those of a prefill row.

    There is one for each token of the row that has one.
    """
    return request.prompt_ids[row.context_len + 1 : row.context_len + 1 + row.num_tokens]


def _token(
    logprobs: Logprobs, index: int | tuple[int, ...], token: int, num_top: int, weights_version: int
) -> TokenLogprobs:
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        assert logprobs.top_ids is not None and logprobs.top is not None
        ids, values = (np.asarray(array)[index][:num_top] for array in (logprobs.top_ids, logprobs.top))
        top = tuple((int(i), float(x)) for i, x in zip(ids, values, strict=True))
    chosen, rank = float(np.asarray(logprobs.chosen)[index]), int(np.asarray(logprobs.rank)[index])
    return TokenLogprobs(token, chosen, top, weights_version, rank)


CLOSED = "expected an open model, this one is closed"

RunOnEngineThread = Callable[[Callable[[], None], Callable[[], None]], None]
"""Runs the first function on the engine's thread between two steps, or the second if the engine is closed."""


def warm_up(
    runner: ModelRunner,
    run_on_engine_thread: RunOnEngineThread,
    close_reason: Callable[[], str | None],
    progress: Progress | None = None,
) -> None:
    """Compiles everything and returns when it is there.

    Args:
        runner: Runner of the model.
        run_on_engine_thread: Runs a function on the engine's thread.
        close_reason: Returns why the engine is closed, if it is.
        progress: Shows the number of programs.

    Raises:
        TorchaxServeError: the engine is closed, or a program cannot be compiled.
    """

    def check_open() -> str | None:
        return None if close_reason() is None else f"a closed engine ({close_reason()})"

    tasks = list(runner.compile_tasks())
    shown: contextlib.AbstractContextManager[Advance] = (
        contextlib.nullcontext(lambda number: None)
        if progress is None
        else progress.stage("compiling programs", len(tasks), "items")
    )
    with shown as advance:
        compile_all(tasks, advance, check_open)
        _call(run_on_engine_thread, runner.warm_up)


def _call(run_on_engine_thread: RunOnEngineThread, function: Callable[[], object]) -> None:
    """Calls a function on the engine's thread, waits for it, and raises what it raises."""
    done = threading.Event()
    errors: list[BaseException] = [TorchaxServeError(CLOSED)]

    def run() -> None:
        errors.clear()
        try:
            function()
        except Exception as error:
            errors.append(error)
        finally:
            done.set()

    run_on_engine_thread(run, done.set)
    done.wait()
    if errors:
        raise errors[0]
