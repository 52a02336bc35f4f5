"""Answers the batches of a server while requests of its clients leave room."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from model_adapters.errors import TorchaxServeError
from torchax_serve.server.app import Application
from torchax_serve.server.auth import ANYBODY
from torchax_serve.server.batch.in_process import InProcessAnswer, post
from torchax_serve.server.batch.jobs import BatchJob, BatchJobs
from torchax_serve.server.batch.lines import BatchRequest, LineError, UsageCount, answer_line, parse_line, read_lines
from torchax_serve.server.batch.run import LINE_OVERHEAD, QUEUE_FULL, capacity_of
from torchax_serve.server.batch.scan import DONE, PartialResults, Scan, line_id, scan
from torchax_serve.server.context import ServerContext, Stage
from torchax_serve.server.errors import where_of
from torchax_serve.server.key_limits import ApiKey

logger = logging.getLogger("torchax_serve.server")

MAX_RUNNING, MAX_RUNNING_OF_KEY = 16, 4
"""Batches that run at once, all together and of one key; others wait."""
MAX_IN_FLIGHT = 256
"""Most requests of a batch at once."""
SHARE = 0.75
"""Share of the requests that run at once which batches may have; the rest is free for a client's at any time."""
PRIORITY = 1000
"""Priority of requests of batches, behind that of clients' requests, which is 0."""
WITH_PRIORITY = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
"""Routes whose bodies may have one."""
TICK_S, SWEEP_S = 0.5, 60.0
CLOSE_S = 10.0
"""Seconds that requests have to end in when the server does."""
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 5.0
"""Seconds after which a request that finds no room is sent again: at first, and at last."""
DISK_RETRY_S = 5.0
"""Seconds after which what the disk has refused is written again."""


class BatchWorker:
    """Runs batches, until `close`. All calls come from the event loop's thread.

    Args:
        app: The server's application.
        jobs: The batches.
    """

    def __init__(self, app: Application, jobs: BatchJobs) -> None:
        self._app, self._context, self._jobs = app, app.context, jobs
        self._runs: dict[str, tuple[_BatchRun, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._slots = _Slots()
        self._task: asyncio.Task[None] | None = None
        self._swept_s, self._is_closed = time.monotonic(), False

    def start(self) -> None:
        """Begins to look for batches, those of before the start included."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._changed.set)

        self._jobs.on_change = wake
        self._task = asyncio.create_task(self._work())

    def stop(self) -> None:
        """Sends no more requests; those that run may end."""
        for run, _ in self._runs.values():
            run.stop()

    async def close(self) -> None:
        """Ends the requests that run; the next start goes on."""
        self._jobs.on_change = lambda: None
        self._is_closed = True  # besides the cancellation, which `wait_for` of Python 3.11 may swallow
        if self._task is not None:
            self._task.cancel()
        for run, _ in self._runs.values():
            run.leave()
        tasks = [task for _, task in self._runs.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
        waiting = [*tasks, *([] if self._task is None else [self._task])]
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _work(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TICK_S)
            self._changed.clear()
            try:
                await self._sweep()
                await self._look()
            except Exception as error:
                logger.error("batches could not be looked at: %s", where_of(error))

    async def _look(self) -> None:
        """Begins the batches that may run, and looks at those that do."""
        unfinished = self._jobs.unfinished()
        if unfinished and self._is_ready:
            self._slots.set_limit(await asyncio.to_thread(self._num_slots))
        for batch in unfinished:
            found = self._runs.get(batch.id)
            if found is not None:
                found[0].look()
            elif self._is_ready and self._may_run(batch):
                run = _BatchRun(batch, self._app, self._jobs, self._slots)
                task = asyncio.create_task(run.run())
                self._runs[batch.id] = run, task
                task.add_done_callback(functools.partial(self._ended, batch.id))

    @property
    def _is_ready(self) -> bool:
        return self._context.stage is Stage.READY and not self._is_closed

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._runs[batch_id]
        self._changed.set()

    def _may_run(self, batch: BatchJob) -> bool:
        num_of_key = sum(run.batch.owner == batch.owner for run, _ in self._runs.values())
        return len(self._runs) < MAX_RUNNING and num_of_key < MAX_RUNNING_OF_KEY

    def _num_slots(self) -> int:
        """Returns how many requests batches may have at once, by the models that are loaded."""
        found = 1
        for service in self._context.loaded:
            with contextlib.suppress(TorchaxServeError):  # it may be unloaded meanwhile
                found = max(found, int(capacity_of(service) * SHARE))
        return found

    async def _sweep(self) -> None:
        if time.monotonic() - self._swept_s >= SWEEP_S:
            self._swept_s = time.monotonic()
            for drop in (self._jobs.drop_old, self._jobs.files.drop_old):
                try:
                    await asyncio.to_thread(drop)
                except OSError as error:
                    logger.warning("old files stay: %s", error.strerror)


class _Slots:
    """Places for requests of batches, given in the order in which they were asked for.

    Attributes:
        scanning: Held while a file is read for the first time, which takes memory and the processor.
    """

    def __init__(self) -> None:
        self.scanning = asyncio.Lock()  # one file at a time is read first
        self._limit, self._num_taken = 1, 0
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    def set_limit(self, limit: int) -> None:
        """Sets how many there are."""
        self._limit = limit
        self._give()

    @contextlib.asynccontextmanager
    async def one(self) -> Any:
        """Has a place while the block runs."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._give()
        try:
            await place
            yield
        finally:
            if place.done() and not place.cancelled():
                self._num_taken -= 1
                self._give()

    def _give(self) -> None:
        while self._waiting and self._num_taken < self._limit:
            place = self._waiting.popleft()
            if not place.done():
                self._num_taken += 1
                place.set_result(None)


class _BatchRun:
    """A batch that runs.

    Attributes:
        batch: The batch.
    """

    def __init__(self, batch: BatchJob, app: Application, jobs: BatchJobs, slots: _Slots) -> None:
        self.batch = batch
        self._app, self._jobs, self._slots = app, jobs, slots
        self._context: ServerContext = app.context
        options = self._context.options
        self._max_bytes = options.connection.max_body_bytes + LINE_OVERHEAD
        self._max_depth = options.request.max_json_depth
        self._gone = asyncio.Event()  # no answer that has not come is wanted any more
        self._is_stopped = False  # no more requests are sent, and the batch goes on after the next start
        self._output: PartialResults | None = None
        self._errors: PartialResults | None = None
        self._usage = UsageCount()
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()

    def stop(self) -> None:
        """Sends no more requests."""
        self._is_stopped = True

    def leave(self) -> None:
        """Ends the requests that run, too; they are sent again after the next start."""
        self._is_stopped = True
        self._gone.set()

    def look(self) -> None:
        """Looks whether the batch is being cancelled, or its time is over."""
        if not self._is_stopped and self._is_over:
            self._gone.set()

    async def run(self) -> None:
        """Answers what is left of the batch, and ends it."""
        try:
            if self.batch.ending is None and not await self._answer_all():
                return
            await self._on_disk(lambda: self._jobs.publish(self.batch))
            logger.info(
                "%s is %s: %d of %d requests answered, %d failed",
                *(self.batch.id, self.batch.status, self.batch.completed, self.batch.total, self.batch.failed),
            )
        except _BatchStoppedError:
            return
        except Exception as error:
            if isinstance(error, OSError):
                logger.error("%s waits, as its files cannot be read: %s", self.batch.id, error.strerror)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), DISK_RETRY_S)
                return
            logger.error("%s has failed: %s", self.batch.id, where_of(error))
            await self._fail("internal_error", "the server failed to answer it; its log has the reason")
        finally:
            for results in (self._output, self._errors):
                if results is not None:
                    with contextlib.suppress(OSError):
                        results.close()

    @property
    def _is_over(self) -> bool:
        return self.batch.status == "cancelling" or self._is_expired

    @property
    def _is_expired(self) -> bool:
        return time.time() >= self.batch.expires_s

    async def _answer_all(self) -> bool:
        """Sends all requests that have no answer; returns whether the batch is to end then."""
        path = self._jobs.files.content_path(self.batch.input_file_id)
        if not path.exists():
            await self._fail("file_not_found", "expected its file, which is not there any more")
            return False
        key = self._context.keys.of_owner(self.batch.owner)
        if key is None and not (self.batch.owner == ANYBODY and self._context.keys.is_open):
            await self._fail("invalid_api_key", "expected its key, which does not exist any more")
            return False
        async with self._slots.scanning:
            found = await asyncio.to_thread(self._scan, path, key)
        if found is None:
            if self._is_stopped:
                raise _BatchStoppedError
        elif found.errors:
            await self._on_disk(lambda: self._jobs.fail(self.batch, found.errors))
            return False
        else:
            self.batch.total = found.total
            self.batch.model = (found.models[0] or None) if len(found.models) == 1 else None
            await asyncio.to_thread(self._open_results, found)
            await self._on_disk(lambda: self._jobs.begin(self.batch))
            await self._send_all(path, found, key)
        if self._is_stopped:
            raise _BatchStoppedError
        ending = "completed"
        if self._is_over and found is not None and any(found.model_of):
            ending = "expired"
            if self.batch.status != "cancelling":
                await self._write_expired(path, found)
        await self._on_disk(lambda: self._jobs.begin_ending(self.batch, ending))
        return True

    def _scan(self, path: Path, key: ApiKey | None) -> Scan | None:
        """Reads the file once, in a thread; returns None if that is not wanted any more."""
        known = {*self._context.every_name}

        def model_error(name: str) -> str | None:
            if not name or (name in known and (key is None or key.allows(name))):
                return None
            return f"the model {name[:100]!r} does not exist; GET /v1/models lists those that do"

        with path.open("rb") as file:
            is_stopped = lambda: self._is_stopped or self.batch.status == "cancelling"  # noqa: E731
            return scan(file, self._max_bytes, self._parsed, model_error, is_stopped)

    def _parsed(self, number: int, content: bytes | None) -> BatchRequest:
        return parse_line(
            number, content, max_bytes=self._max_bytes, max_depth=self._max_depth, urls=(self.batch.endpoint,)
        )

    def _open_results(self, found: Scan) -> None:
        """Opens the answers and errors so far, and takes their lines off those that are to be sent."""
        files, numbers = self._jobs.files, []
        self._output = PartialResults(files.part_path(self.batch.output_id))
        self._errors = PartialResults(files.part_path(self.batch.error_id))
        for results in (self._output, self._errors):
            num_lines = 0
            for number, line in results.recover():
                if number < len(found.model_of):
                    found.model_of[number] = DONE
                if results is self._output:
                    self._usage.add(json.loads(line)["response"]["body"])
                num_lines += 1
            numbers.append(num_lines)
        self.batch.completed, self.batch.failed = numbers
        self.batch.usage = self._usage.shown()

    async def _send_all(self, path: Path, found: Scan, key: ApiKey | None) -> None:
        """Sends the requests model by model, so that several models are not loaded in turns."""
        for place in range(len(found.models)):
            with path.open("rb") as file:
                lines = self._lines_of(file, found, place)
                workers = [asyncio.create_task(self._work(lines, found, key)) for _ in range(MAX_IN_FLIGHT)]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)

    def _lines_of(self, file: BinaryIO, found: Scan, place: int) -> Iterator[BatchRequest]:
        """Yields the requests for a model that have no answer."""
        for number, content in read_lines(file, self._max_bytes):
            if number < len(found.model_of) and found.model_of[number] == 1 + place:
                with contextlib.suppress(LineError):  # it was a request when the file was read first
                    yield self._parsed(number, content)

    async def _work(self, lines: Iterator[BatchRequest], found: Scan, key: ApiKey | None) -> None:
        """Answers one request after the other, until there is none left."""
        while True:
            async with self._slots.one():
                async with self._reading:
                    if self._is_stopped or self._gone.is_set():
                        return
                    # In a thread, as many lines may be passed over.
                    request = await asyncio.to_thread(next, lines, None)
                if request is None:
                    return
                answer = await self._answered(request, key)
                if answer is None:
                    return
                await self._write(request, answer)
                found.model_of[request.line] = DONE

    async def _answered(self, request: BatchRequest, key: ApiKey | None) -> InProcessAnswer | None:
        """Returns the answer to a request, sooner or later; None if it is not wanted any more."""
        body, pause_s = request.body, FIRST_RETRY_S
        given = body.get("priority")
        if request.url in WITH_PRIORITY and (given is None or type(given) is int):  # others are refused as they are
            body = {**body, "priority": max(given or 0, PRIORITY)}
        has_limits = self._context.key_usages.of(key) is not None
        while True:
            was_only = self._context.num_in_flight == 0
            answer = await post(self._app, request.url, body, key=key, gone=self._gone)
            if self._gone.is_set() and answer.status != 200:
                return None
            if answer.status >= 500 and self._context.stage is not Stage.READY:
                return None  # the server ends, and the next one answers
            is_only = was_only and self._context.num_in_flight == 0
            if answer.status != QUEUE_FULL or (is_only and not has_limits):
                return answer  # 429 of a request that finds nothing in front of it stays
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), pause_s)
            pause_s = min(2 * pause_s, LAST_RETRY_S)
            if self._is_stopped or self._gone.is_set():
                return None

    async def _write(self, request: BatchRequest, answer: InProcessAnswer) -> None:
        results = self._output if answer.status == 200 else self._errors
        assert results is not None
        line = answer_line(request, *answer, line_id=line_id(self.batch.id, request.line))
        async with self._writing:
            await self._on_disk(lambda: results.write(line))
        if answer.status == 200:
            self.batch.completed += 1
            self._usage.add(answer.body)
            self.batch.usage = self._usage.shown()
        else:
            self.batch.failed += 1

    async def _write_expired(self, path: Path, found: Scan) -> None:
        """Writes an error for each request that has no answer."""
        assert self._errors is not None
        errors, error = self._errors, {"code": "batch_expired", "message": "the completion window has passed"}

        def write() -> None:
            with path.open("rb") as file:
                for place in range(len(found.models)):
                    file.seek(0)
                    for request in self._lines_of(file, found, place):
                        given = {"id": line_id(self.batch.id, request.line), "custom_id": request.custom_id}
                        errors.write({**given, "response": None, "error": error})
                        found.model_of[request.line] = DONE
                        self.batch.failed += 1

        await self._on_disk(write)

    async def _fail(self, code: str, message: str) -> None:
        error = {"code": code, "line": None, "message": message, "param": None}
        await self._on_disk(lambda: self._jobs.fail(self.batch, [error]))

    async def _on_disk(self, write: Callable[[], None]) -> None:
        """Calls what writes in a thread, again and again while the disk is full.

        Raises:
            _BatchStoppedError: The server ends meanwhile.
        """
        is_told = False
        while True:
            writing = asyncio.ensure_future(asyncio.to_thread(write))
            try:
                await asyncio.shield(writing)
                return
            except asyncio.CancelledError:
                await asyncio.wait({writing})  # the file is closed behind it
                raise
            except OSError as error:
                if not is_told:
                    logger.error("%s waits for room on the disk: %s", self.batch.id, error.strerror)
                is_told = True
                until_s = time.monotonic() + DISK_RETRY_S
            while time.monotonic() < until_s:
                if self._is_stopped:
                    raise _BatchStoppedError
                await asyncio.sleep(FIRST_RETRY_S)


class _BatchStoppedError(Exception):
    """Leaves a batch as it is on the disk, for the next start."""
