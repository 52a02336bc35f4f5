"""Texts of many requests in one call of the model: what waits while a call runs goes into the next one."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

from model_adapters.errors import QueueFullError

MAX_BATCH_TEXTS = 256
"""Most texts of one call; larger calls are not faster, and a request that comes meanwhile waits for its end."""
MAX_WAITING_TEXTS = 16384
"""Most texts that wait."""

Call = Callable[..., Any]


@dataclasses.dataclass(eq=False)
class _Waiting:
    key: Hashable
    call: Call
    items: Sequence[Any]
    result: asyncio.Future[list[Any]]


class PoolingBatches:
    """Queue of texts to embed, label or score.

    Args:
        run: Calls a function in a thread.
    """

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        self._run = run
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._task: asyncio.Task[None] | None = None

    async def submit(self, key: Hashable, call: Call, items: Sequence[Any]) -> list[Any]:
        """Returns the results of `call` for `items`; requests with equal keys may share a call.

        Raises:
            QueueFullError: Too many texts are waiting.
        """
        if sum(len(each.items) for each in self._waiting) + len(items) > MAX_WAITING_TEXTS:
            raise QueueFullError("expected room in the queue of texts, found it full")
        entry = _Waiting(key, call, items, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await entry.result

    async def _work(self) -> None:
        while batch := self._next_batch():
            await self._run_batch(batch)

    def _next_batch(self) -> list[_Waiting]:
        """Removes and returns the oldest request that is not cancelled, and those that can go with it."""
        batch: list[_Waiting] = []
        others: list[_Waiting] = []
        num_items = 0
        while self._waiting:
            entry = self._waiting.popleft()
            if entry.result.cancelled():
                continue
            fits = not batch or (entry.key == batch[0].key and num_items + len(entry.items) <= MAX_BATCH_TEXTS)
            if fits:
                batch.append(entry)
                num_items += len(entry.items)
            else:
                others.append(entry)
        self._waiting.extend(others)
        return batch

    async def _run_batch(self, batch: Sequence[_Waiting]) -> None:
        items = [item for entry in batch for item in entry.items]
        try:
            results: list[Any] = list(await self._run(batch[0].call, items))
        except Exception as error:
            if len(batch) == 1:
                _settle(batch[0], error=error)
                return
            for entry in batch:  # one by one: the fault is of one of them
                await self._run_batch([entry])
            return
        for entry in batch:
            _settle(entry, results[: len(entry.items)])
            results = results[len(entry.items) :]


def _settle(entry: _Waiting, results: list[Any] | None = None, error: Exception | None = None) -> None:
    if entry.result.done():  # cancelled meanwhile
        return
    if error is not None:
        entry.result.set_exception(error)
    else:
        entry.result.set_result(results or [])
