"""Requests on their way into the scheduler: checked by callers, entered by the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from torchax_serve.engine.masked_requests import MaskedRequests
from torchax_serve.engine.model_runner import ModelRunner
from torchax_serve.engine.output_processor import OutputProcessor, describe
from torchax_serve.engine.request import EngineRequest
from torchax_serve.engine.request_handle import RequestHandle, RequestOutput
from torchax_serve.outputs import FinishReason
from torchax_serve.sampling.forbidden_tokens import check_tokens_left
from torchax_serve.scheduler import RequestId, RowResult, Scheduler

Command = Callable[[], None]


class Entries:
    """Makes the commands with which requests enter.

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

    def make(self, request: EngineRequest) -> tuple[Command, RequestHandle]:
        """Returns the command that enters a request on the engine's thread, and the handle.

        Raises:
            InvalidArgumentError: the request can never run.
            NoTokenLeftError: its masks and other options leave no first token.
        """
        request_id = next(self._ids)

        def cancel(reason: FinishReason) -> None:
            request.cancel()
            self.send(functools.partial(end, reason))  # behind its entry, if that is held

        def end(reason: FinishReason) -> None:
            if self._scheduler.abort(request_id, reason):
                self._output_processor.deliver([RowResult(request_id, None, (), reason)])

        handle = RequestHandle(request_id, len(request.prompt_ids), cancel)
        request = self._runner.with_num_top(request.within(self._scheduler.config.max_model_len))
        request = self._runner.with_adapter(request)
        scheduled = request.to_scheduler(request_id, time.monotonic())
        self._scheduler.config.check_prompt(f"request {request_id}", handle.prompt_len)
        self._runner.validate(f"request {request_id}", request)
        if request.masks is not None:
            tokens = request.prompt_ids
            check_tokens_left(request.sampling, request.masks, tokens, len(tokens), only_with_others=True)
        # The command may not keep a handle alive whose reader has dropped it.
        reader = weakref.ref(handle)

        def enter() -> None:
            handle = reader()
            if handle is None:
                return
            try:
                parent = None if scheduled.fork_of is None else self._scheduler.find(scheduled.fork_of)
                # A parent that has ended has left its prompt in the prefix cache.
                entering = scheduled if parent else dataclasses.replace(scheduled, fork_of=None)
                handle.state = self._scheduler.add(entering)
            except Exception as error:  # its reader's, not the engine's
                handle.put(RequestOutput((), finish_reason="error", error=describe(error)))
            else:
                self._output_processor.add(request_id, request, handle)
                self._masked.add(request_id, request.masks)

        return enter, handle

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
