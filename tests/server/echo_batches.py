"""Batches of a store that an application without a model answers; as a program it is killed again and again."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from torchax_serve.server.app import ROUTES
from torchax_serve.server.batch.files import FileLimits, FileStore
from torchax_serve.server.batch.jobs import BatchJobs
from torchax_serve.server.batch.worker import BatchWorker
from torchax_serve.server.context import ServerContext, Stage
from torchax_serve.server.options import ServerOptions

LIMITS = FileLimits(max_files=100, max_bytes=1 << 20, max_file_bytes=1 << 20, max_age_s=1e6)


class EchoApp:
    """Answers each request with a number of its body, every tenth with 400, and writes down that it was sent.

    Args:
        folder: Where it writes.
        delay_s: Seconds that an answer takes.
        num_refused: First requests that find the queue full.
    """

    routes = ROUTES

    def __init__(self, folder, delay_s=0.0, num_refused=0):
        self.context = ServerContext(ServerOptions())
        self.context.stage = Stage.READY
        self.bodies, self.num_sent = [], 0
        self.context.num_in_flight += num_refused > 0  # of another client
        self._sent, self._delay_s, self._num_refused = Path(folder) / "sent", delay_s, num_refused

    async def __call__(self, scope, receive, send):
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        self.num_sent += 1
        self.context.num_in_flight += 1
        try:
            with self._sent.open("a") as file:
                file.write(json.dumps(body) + "\n")
            await asyncio.sleep(self._delay_s)
        finally:
            self.context.num_in_flight -= 1
        status = 400 if body.get("n", 1) % 10 == 0 else 200
        if self.num_sent <= self._num_refused:
            self.context.num_in_flight -= self.num_sent == self._num_refused
            status = 429
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"r")]
        answer = {"echo": body.get("n"), "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def stored(folder, num_lines, owner="anybody"):
    """Returns the batches of a folder, whose store has a file with so many requests under the id ``file-in``."""
    files = FileStore(Path(folder) / "files", LIMITS)
    jobs = BatchJobs(Path(folder) / "batches", files)
    lines = [
        json.dumps({"custom_id": f"line {n}", "method": "POST", "url": "/tokenize", "body": {"n": n}})
        for n in range(num_lines)
    ]
    files.content_path("file-in").write_text("\n".join(lines))
    files.add("file-in", owner, "in.jsonl", "batch")
    return jobs


def ended(jobs):
    """Whether no batch runs any more."""
    return not jobs.unfinished()


def lines_of(jobs, file_id):
    """Returns the lines of a file."""
    path = jobs.files.content_path(file_id)
    return [json.loads(line) for line in path.read_text().splitlines()]


async def _answer(folder):
    jobs = BatchJobs(folder / "batches", FileStore(folder / "files", LIMITS))
    running = BatchWorker(EchoApp(folder, delay_s=0.001), jobs)
    running.start()
    while not ended(jobs):
        await asyncio.sleep(0.01)
    await running.close()


def main(folder, num_kills):
    """Starts the batches of a folder in processes that are killed at any time, and at last in one that is not."""
    draw, num_killed = random.Random(7), 0
    for index in range(num_kills + 1):
        child = os.fork()
        if not child:
            asyncio.run(_answer(folder))
            os._exit(0)
        if index < num_kills:
            time.sleep(draw.uniform(0.01, 0.12))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        num_killed += os.WIFSIGNALED(status)
    print(num_killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
