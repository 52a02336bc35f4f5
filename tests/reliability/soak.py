"""Mixed requests for long, a tenth of them cut off; a command, since it takes long.

    python tests/reliability/soak.py --requests 100000

Every complete answer is compared with the one that the same request got first, and no program may be compiled after the
warm-up. At the end: growth of memory, threads and descriptors between the first fifth and the last.
"""

import argparse
import array
import asyncio
import gc
import itertools
import json
import random
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from running_server import ENGINE, RunningServer

from torchax_serve import serve

SCHEMA = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}, "good": {"type": "boolean"}}}
PROMPTS = [f"What is {number} plus {number + 1}?" for number in range(40)]


def request_of(rng):
    """A path and a body; equal bodies have equal answers."""
    prompt = rng.choice(PROMPTS)
    kind = rng.randrange(9)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
    plain = {"model": "tiny", "prompt": prompt, "max_tokens": 24}
    seed = rng.randrange(4)
    return [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "temperature": 1.2, "seed": seed, "n": 2}),
        ("/v1/completions", {**plain, "logprobs": 3, "echo": True}),
        ("/v1/completions", {**plain, "guided_regex": "[a-z]{5,12}", "temperature": 1.0, "seed": seed}),
        ("/v1/embeddings", {"model": "tiny", "input": prompt, "pooling": "mean"}),
        ("/v1/completions", {**plain, "guided_json": SCHEMA, "max_tokens": 60}),
        ("/v1/completions", {**plain, "presence_penalty": 1, "logit_bias": {"40": 2}, "bad_words": ["the"]}),
        ("/v1/chat/completions", {**chat, "stream": True, "min_p": 0.1, "temperature": 0.7, "seed": seed}),
        ("/tokenize", {"prompt": prompt}),
    ][kind]


async def ask(port, path, body, cut_after_s):
    """The body of the answer without what differs by time; None if the client left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        async with asyncio.timeout(cut_after_s):
            answer = await reader.read(-1)
    except TimeoutError:
        writer.transport.abort()
        return None
    writer.close()
    status = int(answer.split(b" ", 2)[1])
    assert status == 200, answer[:500]
    if body.get("stream"):
        assert b"data: [DONE]" in answer, answer[-500:]
        return "".join(map(delta_of, answer.split(b"data: {")[1:]))
    found = json.loads(answer.partition(b"\r\n\r\n")[2])
    if path == "/v1/embeddings":
        return [round(value, 3) for value in found["data"][0]["embedding"][:8]]
    return [{"text": c.get("text"), "message": c.get("message")} for c in found.get("choices", ())] or found["tokens"]


def delta_of(event):
    """The text of a chunk, the rest of the event behind ``data: {``."""
    return json.loads(b"{" + event.partition(b"\n\n")[0])["choices"][0]["delta"].get("content", "")


async def soak(model, port, num_requests, num_clients, most_s):
    rng = random.Random(7)
    known, seconds, marks = {}, array.array("f"), []
    process = psutil.Process()
    until = time.monotonic() + most_s
    left = itertools.takewhile(lambda _: time.monotonic() < until, range(num_requests))

    async def client():
        for index in left:
            path, body = request_of(rng)
            cut = rng.random() * 0.1 if rng.random() < 0.1 else None
            began = time.monotonic()
            answer = await ask(port, path, body, cut)
            seconds.append(time.monotonic() - began)
            if answer is not None:
                key = path + json.dumps(body)
                assert known.setdefault(key, answer) == answer, (path, body, known[key], answer)
            if index % 1000 == 0:
                gc.collect()
                counts = process.num_threads(), process.num_fds(), model.engine.stats().num_programs
                marks.append((index, process.memory_info().rss >> 10, *counts))
                print("{}: {} KiB, {} threads, {} descriptors, {} programs".format(*marks[-1]), flush=True)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return seconds, marks, len(known)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many seconds")
    arguments = parser.parse_args()
    with serve(engine=ENGINE) as model:
        model.engine.warm_up()
        server = RunningServer(model, access_log=False)
        port, most_s = server.address[1], arguments.seconds
        seconds, marks, num_known = asyncio.run(soak(model, port, arguments.requests, arguments.clients, most_s))
        assert server.pages_are_back(model)
        server.stop()
    fifth = len(seconds) // 5
    for name, part in (("first", seconds[:fifth]), ("last", seconds[-fifth:])):
        print(f"{name} fifth: p99 {1000 * sorted(part)[int(0.99 * len(part))]:.0f} ms")
    late = [mark for mark in marks if mark[0] >= len(seconds) // 5]
    (first, *_, last), num = late, late[-1][0] - late[0][0]
    print(f"{len(seconds)} requests, {num_known} different ones, each with one answer")
    growth = last[1] - first[1]
    print(
        f"over the last {num}: {growth:+} KiB ({10_000 * growth / num:+.0f} for 10,000), {first[4]} programs at first"
    )
    assert (first[2], first[4]) == (last[2], last[4]), (first, last)
    assert abs(last[3] - first[3]) <= 2 * arguments.clients, (first, last)  # sockets of the requests of that moment


if __name__ == "__main__":
    main()
