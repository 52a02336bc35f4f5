"""What HTTP costs on top of the engine: latency at a fixed rate, tokens/s of many streams, structured output.

    python benchmarks/server.py --rate 50 --streams 500
    python benchmarks/server.py --starts --model FOLDER
    python benchmarks/server.py --dialects --turns 9

The engine is measured in this process, a server of the same model in a process of its own, in turns, by a client that
does nothing but read its sockets. Medians of the turns are shown. Without a model, the embedded one.

With `--dialects` the same chats, whose greedy answers are the same, go through each interface in turns: tokens/s of as
many streams as the server has rows, processor time of the server for a token, and milliseconds to the first token of a
stream alone.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PROMPT = "Tell me a story about a fox and a crow."


async def at_rate(ask, rate, num_requests):
    """Starts requests at a fixed rate; returns the seconds of each."""

    async def timed(delay_s):
        await asyncio.sleep(delay_s)
        began = time.perf_counter()
        await ask()
        return time.perf_counter() - began

    return await asyncio.gather(*(timed(index / rate) for index in range(num_requests)))


async def tokens_per_s(ask, num_streams, gap_s=0.0):
    """Tokens/s of streams that begin `gap_s` after each other; so rows are not in step with each other on any side."""

    async def later(delay_s):
        await asyncio.sleep(delay_s)
        return await ask()

    began = time.perf_counter()
    counts = await asyncio.gather(*(later(index * gap_s) for index in range(num_streams)))
    return sum(counts) / (time.perf_counter() - began)


class EngineClient:
    def __init__(self, model, max_tokens):
        from torchax_serve import SamplingParams

        self.model, self.params = model, SamplingParams(max_new_tokens=max_tokens, ignore_eos=True)

    async def __call__(self):
        count = 0
        async for _ in self.model.stream(PROMPT, self.params)._tokens.handle:
            count += 1
        return self.params.max_new_tokens


class HttpClient:
    def __init__(self, port, max_tokens, **fields):
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            **fields,
        }
        self.port, self.max_tokens = port, max_tokens
        data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "Connection: close", "", ""])
        self.data = head.encode() + data

    async def __call__(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.data)
        received = b""
        while piece := await reader.read(65536):
            received = (received + piece)[-400:]
        writer.close()
        assert b'"length"' in received and b"data: [DONE]" in received, received
        return self.max_tokens


MESSAGES = [{"role": "user", "content": PROMPT}]
DIALECTS = {
    "/v1/chat/completions": ("max_tokens", {"temperature": 0}, b'"content":"'),
    "/v1/messages": ("max_tokens", {"temperature": 0}, b"content_block_delta"),
    "/v1/responses": ("max_output_tokens", {"temperature": 0, "store": False}, b"output_text.delta"),
    "/api/chat": ("num_predict", {"temperature": 0}, b'"content":"'),
}
"""By path: the name of the limit, further fields, and what the event of the first token has in it."""


def dialect_body(path, num_tokens, *, is_streamed=True):
    limit, further, _ = DIALECTS[path]
    messages = {"input" if path == "/v1/responses" else "messages": MESSAGES}
    options = {limit: num_tokens, **further}
    fields = {"options": options} if path == "/api/chat" else options
    return {"model": "tiny", "stream": is_streamed, **messages, **fields}


def told_text(path, answer):
    """The text of a whole answer, and the number of its tokens where it is told in OpenAI's form."""
    if path == "/v1/chat/completions":
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]
    if path == "/v1/messages":
        return answer["content"][0]["text"], answer["usage"]["output_tokens"]
    if path == "/v1/responses":
        return answer["output"][0]["content"][0]["text"], answer["usage"]["output_tokens"]
    return answer["message"]["content"], answer["eval_count"]


class DialectClient:
    """Streams of an answer through an interface."""

    def __init__(self, port, path, num_tokens):
        self.port, self.begin = port, DIALECTS[path][2]
        data = json.dumps(dialect_body(path, num_tokens)).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "Connection: close", "", ""])
        self.data = head.encode() + data

    async def __call__(self):
        """Seconds to the first token."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        began, first_s, received = time.perf_counter(), None, b""
        writer.write(self.data)
        while piece := await reader.read(65536):
            received += piece
            if first_s is None and self.begin in received:
                first_s = time.perf_counter() - began
        writer.close()
        assert first_s is not None and received.startswith(b"HTTP/1.1 200"), received[-400:]
        return first_s


def measure_dialects(arguments):
    """Tokens/s, processor time and first tokens through each interface."""
    import psutil

    port = free_port()
    process = start_server(arguments, port)
    times = psutil.Process(process.pid).cpu_times

    async def turn(make):
        client, num_tokens = make()
        began, before = time.perf_counter(), sum(times()[:2])
        for _ in range(arguments.rounds):
            await asyncio.gather(*(client() for _ in range(arguments.seqs)))
        count = num_tokens * arguments.seqs * arguments.rounds
        found = {"tokens_per_s": count / (time.perf_counter() - began)}
        found["cpu_us_per_token"] = 1e6 * (sum(times()[:2]) - before) / count
        return found | {"first_ms": 1000 * statistics.median([await client() for _ in range(20)])}

    try:
        whole = {path: dialect_body(path, arguments.tokens, is_streamed=False) for path in DIALECTS}
        told = {path: told_text(path, asked(port, path, body)) for path, body in whole.items()}
        (text,) = {text for text, _ in told.values()}  # every interface has the same answer
        print(f"{told['/v1/chat/completions'][1]} tokens: {text[:60]!r}...", flush=True)
        sides = {
            path: lambda path=path: (DialectClient(port, path, arguments.tokens), told[path][1]) for path in DIALECTS
        }
        in_turns(sides, 1, turn)
        found = in_turns(sides, arguments.turns, turn)
    finally:
        process.terminate()
        process.wait()
    first = found["/v1/chat/completions"]
    for path, each in found.items():
        each["ratios"] = {name: each[name] / first[name] for name in first if name not in ("turns", "ratios")}
        print(f"{path}: {', '.join(f'{name} {value:.3f}' for name, value in each['ratios'].items())}")
    return found


def asked(port, path, body):
    """Returns the JSON that a server answers."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def start_server(arguments, port, **environment):
    code = "from torchax_serve.cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        *([arguments.model] if arguments.model else []),
        "--port",
        str(port),
    ]
    command += [
        "--served-model-name",
        "tiny",
        "--max-num-seqs",
        str(arguments.seqs),
        "--max-num-waiting",
        "1000",
        "--no-access-log",
    ]
    if arguments.max_model_len is not None:
        command += ["--max-model-len", str(arguments.max_model_len)]
    process = subprocess.Popen(command, env={**os.environ, **environment})
    while not is_ready(port, "/readyz"):
        assert process.poll() is None
        time.sleep(0.05)
    return process


def measure_starts(arguments):
    """Seconds from the start of the process to the first 200 of /readyz: with empty caches, and with those of before.

    The first start also builds the C++ kernels.
    """
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(1 + arguments.turns):
            port, began = free_port(), time.perf_counter()
            process = start_server(arguments, port, XDG_CACHE_HOME=cache)
            found.append(time.perf_counter() - began)
            print(f"ready after {found[-1]:.2f} s", flush=True)
            process.terminate()
            process.wait()
    first_s, second_s = found[0], statistics.median(found[1:])
    return {"first_s": first_s, "second_s": second_s, "ratio": second_s / first_s, "turns": found}


def is_ready(port, path):
    """Whether a server answers `path` with 200."""
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            return b" 200 " in connection.recv(100)
    except OSError:
        return False


async def load(make, arguments):
    """Milliseconds of requests at a fixed rate, and tokens/s of many streams."""
    ordered = sorted(1000 * each for each in await at_rate(make(16), arguments.rate, arguments.requests))
    found = {"p50_ms": statistics.median(ordered), "p99_ms": ordered[int(0.99 * len(ordered))]}
    return found | {
        "tokens_per_s": await tokens_per_s(make(arguments.tokens), arguments.streams, arguments.gap_ms / 1000)
    }


def in_turns(sides, num_turns, measure):
    """Medians over turns of what `measure` returns for each side, by name."""
    turns = {name: [] for name in sides}
    for _ in range(num_turns):
        for name, make in sides.items():
            turns[name].append(asyncio.run(measure(make)))
            print(f"{name}: {', '.join(f'{key} {value:.1f}' for key, value in turns[name][-1].items())}", flush=True)
    return {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]} | {"turns": found}
        for name, found in turns.items()
    }


async def warmed(make):
    for _ in range(3):
        await asyncio.gather(*(make(16)() for _ in range(8)))
    return {}


def measure_load(arguments):
    """Latency at a fixed rate and tokens/s, of the engine and of the server; ratios of both."""
    from torchax_serve import EngineOptions, serve

    port = free_port()
    process = start_server(arguments, port)
    held = {"guided_regex": "[a-z ]{3000}", "ignore_eos": None}

    def http(**fields):
        return lambda num_tokens: HttpClient(port, num_tokens, **fields)

    async def rows(make):
        return {"tokens_per_s": await tokens_per_s(make(128), arguments.seqs)}

    try:
        with serve(arguments.model, engine=EngineOptions(max_num_seqs=arguments.seqs, max_num_waiting=1000)) as model:
            model.engine.warm_up()
            sides = {"engine": lambda num_tokens: EngineClient(model, num_tokens), "server": http()}
            in_turns(sides | {"structured": http(**held)}, 1, warmed)
            found = {"load": in_turns(sides, arguments.turns, lambda make: load(make, arguments))}
        sides = {"plain": http(), "structured": http(**held)}
        found["structured"] = in_turns(sides, 2 * arguments.turns, rows)
    finally:
        process.terminate()
        process.wait()
    engine, server = found["load"]["engine"], found["load"]["server"]
    plain, structured = found["structured"]["plain"], found["structured"]["structured"]
    ratios = {
        "overhead_p50_ms": server["p50_ms"] - engine["p50_ms"],
        "overhead_p99_ms": server["p99_ms"] - engine["p99_ms"],
        "streams": server["tokens_per_s"] / engine["tokens_per_s"],
        "structured": structured["tokens_per_s"] / plain["tokens_per_s"],
    }
    print(", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    return {"ratios": ratios} | found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=192, help="of a stream")
    parser.add_argument("--gap-ms", type=float, default=2, help="between the beginnings of two streams")
    parser.add_argument("--seqs", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, help="of the server; a longer one has a larger cache to allocate")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--starts", action="store_true", help="measure the starts of the server, and nothing else")
    parser.add_argument("--dialects", action="store_true", help="measure the interfaces, and nothing else")
    parser.add_argument("--rounds", type=int, default=3, help="of streams through an interface in a turn")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.starts:
        found = {"starts": measure_starts(arguments)}
    elif arguments.dialects:
        found = {"dialects": measure_dialects(arguments)}
    else:
        found = measure_load(arguments)
    if arguments.output is not None:
        from torchax_serve.bench.machine import Machine

        facts = {"command": " ".join(["python", *sys.argv]), "machine": dataclasses.asdict(Machine.here())}
        arguments.output.write_text(json.dumps(facts | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
