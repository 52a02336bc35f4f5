"""Runs a batch: requests of a file go to the server's application as the engine takes them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

from model_adapters.errors import RequestError, UnsupportedModelError
from torchax_serve.server.app import Application
from torchax_serve.server.batch.in_process import InProcessAnswer, post
from torchax_serve.server.batch.lines import (
    BatchRequest,
    LineError,
    answer_line,
    batch_urls,
    error_line,
    parse_line,
    read_lines,
)
from torchax_serve.server.context import ServerContext, Stage
from torchax_serve.server.model_service import NUM_THREADS, ModelService, progress_of
from torchax_serve.server.options import ServerOptions

if TYPE_CHECKING:
    from torchax_serve.entrypoints.served_model import ServedModel  # imports torch, which a bundle needs not
    from torchax_serve.server.batch.results import BatchResults

LOOK_AHEAD = 2
"""Requests in flight for each that the engine can run: the next ones are tokenized and wait."""
LINE_OVERHEAD = 4096
"""Bytes of a line besides its body."""
QUEUE_FULL = 429
RETRY_S = 0.05
"""Seconds after which a request that found the queue full is sent again."""


@dataclasses.dataclass
class BatchCounts:
    """What a batch has done so far.

    Attributes:
        num_answered, num_failed: Requests with an answer; with an error of the server or of their line.
        num_skipped: Requests that an earlier run has answered.
        num_prompt_tokens, num_new_tokens: Tokens of the answered ones.
    """

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0

    @property
    def num_done(self) -> int:
        """Lines that are done with."""
        return self.num_answered + self.num_failed + self.num_skipped

    def add(self, answer: InProcessAnswer) -> None:
        """Counts an answer."""
        if answer.status != 200:
            self.num_failed += 1
            return
        self.num_answered += 1
        usage = answer.body.get("usage") if isinstance(answer.body, dict) else None
        if isinstance(usage, dict):
            self.num_prompt_tokens += usage.get("prompt_tokens") or 0
            self.num_new_tokens += usage.get("completion_tokens") or 0


def run_batch(
    model: ServedModel,
    source: BinaryIO,
    results: BatchResults,
    options: ServerOptions,
    *,
    max_in_flight: int | None = None,
    show: Callable[[BatchCounts], None] = lambda counts: None,
) -> BatchCounts:
    """Answers the requests of a file; results come in the order in which requests end.

    Args:
        model: Model that answers.
        source: Lines of the file.
        results: Where results go.
        options: Of the server's application.
        max_in_flight: Requests that are sent and not answered; None: `LOOK_AHEAD` for each that the engine can run.
        show: Called after each result.

    Raises:
        RequestError: The engine has ended.
        OSError: A result could not be written.
    """
    return asyncio.run(_Batch(model, source, results, options, show).run(max_in_flight))


class _Batch:
    """One run over a file."""

    def __init__(
        self,
        model: ServedModel,
        source: BinaryIO,
        results: BatchResults,
        options: ServerOptions,
        show: Callable[[BatchCounts], None],
    ) -> None:
        self._context = ServerContext(options)
        self._app = Application(self._context)
        self._urls = batch_urls(self._app.routes)
        self._service = ModelService(model, options)
        limits = options.connection
        self._max_bytes = limits.max_body_bytes + LINE_OVERHEAD
        self._lines = read_lines(source, self._max_bytes)
        self._results, self._show, self.counts = results, show, BatchCounts()
        self._seen: dict[bytes, int] = {}  # numbers of lines by a digest of their custom_id
        self._num_in_flight = self._num_sent = 0
        self._retrying = asyncio.Lock()

    async def run(self, max_in_flight: int | None) -> BatchCounts:
        """Answers all requests; see `run_batch`."""
        await asyncio.to_thread(self._service.prepare)
        self._context.set_service(self._service)
        self._context.stage = Stage.READY
        number = LOOK_AHEAD * capacity_of(self._service) if max_in_flight is None else max_in_flight
        reading = asyncio.Lock()
        workers = [asyncio.create_task(self._work(reading)) for _ in range(number)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._context.metrics.close()
        return self.counts

    async def _work(self, reading: asyncio.Lock) -> None:
        """Answers one request after the other, until there is none left."""
        while True:
            async with reading:
                # In a thread, as what writes into a pipe may be slow.
                found = await asyncio.to_thread(next, self._lines, None)
                request = None if found is None else self._request(*found)
            if found is None:
                return
            if request is not None:
                answer = await self._answer(request)
                self.counts.add(answer)
                self._results.write(answer_line(request, *answer))
            self._show(self.counts)

    def _request(self, number: int, content: bytes | None) -> BatchRequest | None:
        """Returns the request of a line; None where there is nothing to answer."""
        try:
            request = parse_line(
                number,
                content,
                max_bytes=self._max_bytes,
                max_depth=self._context.options.request.max_json_depth,
                urls=self._urls,
            )
            digest = hashlib.blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if (first := self._seen.setdefault(digest, number)) != number:
                message = f"custom_id: expected one of its own, got that of line {first}; rename it"
                raise LineError(number, message, request.custom_id)
        except LineError as error:
            self.counts.num_failed += 1
            self._results.write(error_line(error))
            return None
        if request.custom_id in self._results.answered:
            self.counts.num_skipped += 1
            return None
        return request

    async def _answer(self, request: BatchRequest) -> InProcessAnswer:
        """Returns the answer; of a request that finds the queue full, once others have left room.

        Raises:
            RequestError: The engine has ended.
        """
        answer = await self._sent(request)
        if answer.status != QUEUE_FULL:
            return answer
        async with self._retrying:
            while True:
                was_only, num_sent = self._num_in_flight == 0, self._num_sent
                answer = await self._sent(request)
                if answer.status != QUEUE_FULL or (was_only and self._num_sent == num_sent + 1):
                    return answer
                await asyncio.sleep(RETRY_S)

    async def _sent(self, request: BatchRequest) -> InProcessAnswer:
        """Sends a request once."""
        self._num_in_flight += 1
        self._num_sent += 1
        try:
            answer = await post(self._app, request.url, request.body)
        finally:
            self._num_in_flight -= 1
        if answer.status >= 500 and not all(each.is_alive for each in progress_of([self._service])):
            raise RequestError("expected an engine that runs, this one has ended; --resume goes on")
        return answer


def capacity_of(service: ModelService) -> int:
    """Returns how many requests run at once."""
    with contextlib.suppress(UnsupportedModelError):
        if service.model.writes_text:
            engine: Any = service.model.engine
            return sum(each.admission.max_num_seqs for each in getattr(engine, "engines", (engine,)))
    return NUM_THREADS
