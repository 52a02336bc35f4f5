"""Steps of several answers in the order in which they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from torchax_serve.server.answers import Answer
from torchax_serve.text.text_stream import AnswerStep


async def merged_steps(answers: Sequence[Answer]) -> AsyncGenerator[list[tuple[Answer, AnswerStep]]]:
    """Yields the steps that have come, those of different answers together.

    Leaving the loop ends all requests.

    Raises:
        RequestError: One of the requests failed.
    """
    if len(answers) == 1:
        async with contextlib.aclosing(answers[0].__aiter__()) as steps:
            async for step in steps:
                yield [(answers[0], step)]
        return
    arrivals: asyncio.Queue[tuple[Answer, AnswerStep | BaseException]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(answer, arrivals)) for answer in answers]
    num_open = len(answers)
    try:
        while num_open:
            batch = [await arrivals.get()]
            while not arrivals.empty():
                batch.append(arrivals.get_nowait())
            steps_of_batch = []
            for answer, arrived in batch:
                if isinstance(arrived, BaseException):
                    raise arrived
                num_open -= arrived.finish_reason is not None
                steps_of_batch.append((answer, arrived))
            yield steps_of_batch
    finally:
        for task in tasks:
            task.cancel()
        for answer in answers:
            if answer.finish_reason is None:
                answer.cancel()


async def _pump(answer: Answer, arrivals: asyncio.Queue[tuple[Answer, AnswerStep | BaseException]]) -> None:
    try:
        async with contextlib.aclosing(answer.__aiter__()) as steps:
            async for step in steps:
                arrivals.put_nowait((answer, step))
    except Exception as error:
        arrivals.put_nowait((answer, error))
