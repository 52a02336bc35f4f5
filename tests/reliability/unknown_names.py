"""Paths, models, methods and keys that nobody knows, by the million; a command, since it takes minutes.

    python tests/reliability/unknown_names.py --count 1000000

Each request has names of its own. Requests are sent several at a time on connections that stay open; an unknown method
ends its connection. At each tenth: memory of the server, and lines and bytes of ``/metrics``. The exit status is 1 if
lines were added, or if memory grew by more than 16 MiB from the second tenth to the last.
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import Process

KEY = "alice-0123456789"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
MIB = 1 << 20
BATCH = 32
"""Requests that are sent before the first answer is read; one of them has an unknown method."""


def request_bytes(method, path, *headers, body=b""):
    lines = (f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers, f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


def batch_of(numbers):
    """The requests of a batch; the last one has an unknown method."""
    known = f"Authorization: Bearer {KEY}"
    for number in numbers[:-1]:
        kind = number % 3
        if kind == 0:
            yield request_bytes("GET", f"/unknown/{number}?x={number}", known, f"X-Request-Id: r{number}")
        elif kind == 1:
            body = json.dumps({"model": f"m{number}", "prompt": "Hi", "user": f"u{number}"}).encode()
            yield request_bytes("POST", "/v1/completions", known, "Content-Type: application/json", body=body)
        else:
            yield request_bytes("GET", f"/v1/models/m{number}", f"Authorization: Bearer {number}")
    yield request_bytes(f"M{numbers[-1]}", "/v1/models", known)


async def client(port, batches, statuses):
    for numbers in batches:
        *left, unknown_method = batch_of(numbers)
        while left:  # again on a new connection where the server has closed one
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"".join(left))
            num_answers = 0
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while num_answers < len(left):
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
                    await reader.readexactly(length)
                    statuses[head.split(b" ", 2)[1].decode()] += 1
                    num_answers += 1
            assert num_answers, "a connection that brings no answer"
            left = left[num_answers:]
            writer.close()
            if not left and unknown_method is not None:  # by itself: the server would refuse those in front of it, too
                left, unknown_method = [unknown_method], None


async def send(port, numbers, num_clients, statuses):
    """Sends requests with these numbers."""
    batches = iter([numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)])
    await asyncio.gather(*(client(port, batches, statuses) for _ in range(num_clients)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    process = Process("--served-model-name", "tiny", "--no-access-log", "--api-key", f"alice:{KEY}")
    statuses, marks, began = collections.Counter(), [], time.monotonic()
    try:
        process.wait_until_ready(within_s=900)
        with httpx.Client(base_url=process.url, headers=AUTHORIZED, timeout=60) as http:
            body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "temperature": 0}
            known = http.post("/v1/completions", json=body).json()["choices"]
            bounds = [arguments.count * tenth // 10 for tenth in range(11)]
            for first, last in itertools.pairwise(bounds):
                asyncio.run(send(process.port, range(first, last), arguments.clients, statuses))
                text = http.get("/metrics").text
                marks.append((process.memory_bytes(), text.count("\n"), len(text)))
                seconds = time.monotonic() - began
                print(f"{last}: {marks[-1][0] / MIB:.1f} MiB, /metrics {marks[-1][1:]}, {seconds:.0f} s", flush=True)
            assert http.post("/v1/completions", json=body).json()["choices"] == known
    finally:
        process.stop()
    print(f"statuses: {dict(statuses)}")
    growth, lines = marks[-1][0] - marks[1][0], marks[-1][1] - marks[1][1]
    print(f"from the second tenth to the last: {growth / MIB:+.1f} MiB, {lines:+} lines of /metrics")
    sys.exit(growth > 16 * MIB or lines != 0)


if __name__ == "__main__":
    main()
