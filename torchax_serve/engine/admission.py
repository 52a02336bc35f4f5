"""Admission of requests to an engine: whether it takes them, and how they enter."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from model_adapters.errors import QueueFullError, QueueTokensError, TorchaxServeError
from torchax_serve.engine.model_runner import MaskedRequests, ModelRunner
from torchax_serve.engine.options import MAX_NUM_WAITING_TOKENS
from torchax_serve.engine.output_processor import OutputProcessor, describe
from torchax_serve.engine.request_handle import RequestHandle, RequestOutput
from torchax_serve.outputs import FinishReason
from torchax_serve.sampling.forbidden_tokens import check_tokens_left
from torchax_serve.scheduler import Request, RequestId, RowResult, Scheduler

DRAINED = (
    "expected an engine that takes requests, this one finishes those that it has (drain() was called); send the "
    "request to another one"
)
"""Error of a request to an engine that drains."""

ASLEEP = "expected a model that is awake, this one has given the memory of its cache away (sleep()); call wake() first"
"""Error of a request to an engine without a cache."""


class Admission:
    """Decides whether an engine takes further requests; used under the engine's lock.

    Args:
        max_num_seqs: Requests that run at once.
        max_num_waiting: Requests that may wait for a slot.
        max_num_waiting_tokens: Tokens of their prompts together.

    Attributes:
        num_entering: Requests that were taken and that the engine's thread has not seen yet.
        num_entering_tokens: Tokens of their prompts.
        refusal: Error of every request, while none are taken; None: they are.
        max_num_seqs, max_num_waiting, max_num_waiting_tokens: As given.
    """

    def __init__(
        self, max_num_seqs: int, max_num_waiting: int, max_num_waiting_tokens: int = MAX_NUM_WAITING_TOKENS
    ) -> None:
        self.num_entering = self.num_entering_tokens = 0
        self.refusal: str | None = None
        self.max_num_waiting, self.max_num_waiting_tokens = max_num_waiting, max_num_waiting_tokens
        self.max_num_seqs = max_num_seqs
        self._most = max_num_seqs + max_num_waiting

    def admit(
        self,
        prompt_lens: Sequence[int],
        scheduler: Scheduler,
        close_reason: str | None,
        *,
        is_continuation: bool = False,
    ) -> None:
        """Takes requests, all or none, which the engine's thread then enters; see `entered`.

        Args:
            prompt_lens: Tokens of the prompt of each; answers to one prompt are requests of their own.
            scheduler: The scheduler, which has the requests that have entered and not ended.
            close_reason: Why the engine is closed; None while it is open.
            is_continuation: Whether they go on with a call that was taken before: its work would be lost if they were
                refused, and there are no more of such calls than were taken.

        Raises:
            QueueFullError: too many requests would wait.
            QueueTokensError: too many tokens of prompts would wait.
            TorchaxServeError: no more requests are taken.
        """
        if close_reason is not None:
            raise TorchaxServeError(f"expected an open model, this one is closed ({close_reason}); call serve() again")
        if self.refusal is not None:
            raise TorchaxServeError(self.refusal)
        num_open, num_new = len(scheduler) + self.num_entering, len(prompt_lens)
        if num_open + num_new > self._most and not is_continuation:
            raise QueueFullError(
                f"expected at most {self._most} requests at a time, {self.max_num_waiting} of them waiting, got "
                f"{num_new} next to {num_open}; ask again later, or raise EngineOptions(max_num_waiting=...)"
            )
        num_new_tokens = sum(prompt_lens[max(0, self.max_num_seqs - num_open) :])  # the first ones find a free slot
        # Prompts that have just come count until the engine's thread has given them their slots.
        num_waiting_tokens = scheduler.num_waiting_tokens + self.num_entering_tokens
        exceeds = num_new_tokens and num_waiting_tokens + num_new_tokens > self.max_num_waiting_tokens
        if exceeds and not is_continuation:
            raise QueueTokensError(
                f"expected at most {self.max_num_waiting_tokens} tokens of prompts that wait, got {num_new_tokens} "
                f"next to {num_waiting_tokens}; ask again later, or raise EngineOptions(max_num_waiting_tokens=...)"
            )
        self.num_entering += num_new
        self.num_entering_tokens += sum(prompt_lens)

    def entered(self, prompt_lens: Sequence[int]) -> None:
        """Counts requests that the scheduler has got, or that have ended before."""
        self.num_entering -= len(prompt_lens)
        self.num_entering_tokens -= sum(prompt_lens)


Command = Callable[[], None]


class InputProcessor:
    """Checks and completes requests, and makes the commands with which they enter.

    Its methods run on the threads of callers; the commands on the engine's.

    Args:
        ids: Ids of the requests to come.
        scheduler, runner, output_processor, masked: Of the engine.
        run: Runs a command on the engine's thread, or the one next to it if the engine is closed.
    """

    def __init__(
        self,
        ids: Iterator[RequestId],
        scheduler: Scheduler,
        runner: ModelRunner,
        output_processor: OutputProcessor,
        masked: MaskedRequests,
        run: Callable[[Command, Command], None],
    ) -> None:
        self._ids, self._run = ids, run
        self._scheduler, self._runner = scheduler, runner
        self._output_processor, self._masked = output_processor, masked
        self._held = threading.local()  # commands that the thread has sent in `together`, and their handles

    def make(self, request: Request) -> tuple[Command, RequestHandle]:
        """Returns the command that enters a request on the engine's thread, and the handle.

        Raises:
            InvalidArgumentError: the request can never run.
            NoTokenLeftError: its masks and other options leave no first token.
        """
        request_id = next(self._ids)
        request = self._completed(request, request_id)

        def cancel(reason: FinishReason) -> None:
            request.cancel()
            self.send(functools.partial(end, reason))  # behind its entry, if that is held

        def end(reason: FinishReason) -> None:
            if self._scheduler.abort(request_id, reason):
                self._output_processor.deliver([RowResult(request_id, None, (), reason)])

        handle = RequestHandle(request_id, len(request.prompt_ids), cancel)
        self._scheduler.config.check_prompt(f"request {request_id}", handle.prompt_len)
        self._runner.validate(f"request {request_id}", request)
        if request.masks is not None:
            tokens = request.prompt_ids
            check_tokens_left(
                request.params,
                request.masks,
                tokens,
                len(tokens),
                vocab_size=self._runner.vocab_size,
                only_with_others=True,
            )
        # The command may not keep a handle alive whose reader has dropped it.
        reader = weakref.ref(handle)

        def enter() -> None:
            handle = reader()
            if handle is None:
                request.close()
                return
            try:
                own = request
                if own.fork_of is not None and self._scheduler.find(own.fork_of) is None:
                    own = dataclasses.replace(own, fork_of=None)  # its parent's prompt is in the prefix cache
                handle.state = self._scheduler.add(own)
            except Exception as error:  # its reader's, not the engine's
                handle.put(RequestOutput((), finish_reason="error", error=describe(error)))
            else:
                self._output_processor.add(request_id, request, handle)
                self._masked.add(request_id, request.masks)

        return enter, handle

    def _completed(self, request: Request, request_id: RequestId) -> Request:
        """Returns a request with what only the engine knows: id, times, adapter, seed and room.

        Its answer is limited to the room of a sequence, at which the scheduler would end it anyway: its token history
        then needs no more memory than that.
        """
        runner, params, now = self._runner, request.params, time.monotonic()
        params.check_tokens(runner.vocab_size)
        params = params.with_num_top(runner.max_logprobs, runner.vocab_size)
        if params.seed is None and params.temperature > 0:
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        adapter, given = runner.adapter_use(params.given.adapter), params.given
        most = min(request.max_new_tokens, max(1, self._scheduler.config.max_model_len - len(request.prompt_ids)))
        return dataclasses.replace(
            request,
            request_id=request_id,
            params=params,
            adapter=adapter,
            salt=request.salt if adapter is None else adapter.salt + request.salt,
            max_new_tokens=most,
            min_new_tokens=min(request.min_new_tokens, most),
            arrived_s=now,
            deadline_s=None if given.timeout_s is None else now + given.timeout_s,
            queue_deadline_s=None if given.queue_timeout_s is None else now + given.queue_timeout_s,
        )

    def send(self, command: Command, handles: Sequence[RequestHandle] = ()) -> None:
        """Has a command run on the engine's thread, at once or at the end of `together`."""
        held = getattr(self._held, "commands", None)
        if held is None:
            self._run(command, lambda: None)
            return
        held.append(command)
        self._held.readers += [weakref.ref(handle) for handle in handles]

    @contextlib.contextmanager
    def together(self, closed: Callable[[], str]) -> Iterator[None]:
        """Lets what the thread sends in the block enter between the same two steps, at its end.

        Args:
            closed: Returns the error of requests whose engine was closed meanwhile.
        """
        if getattr(self._held, "commands", None) is not None:
            yield  # it is a part of the block around it
            return
        self._held.commands, self._held.readers = [], []
        try:
            yield
        finally:
            commands, readers = self._held.commands, self._held.readers
            self._held.commands = self._held.readers = None

            def enter_all() -> None:
                for command in commands:
                    command()

            def fail_all() -> None:
                for handle in filter(None, (reader() for reader in readers)):
                    handle.fail(closed())

            if commands:
                self._run(enter_all, fail_all)
