"""What HTTP costs on top of the engine: latency at a fixed rate, tokens/s of many streams, structured output.

    python benchmarks/server.py --rate 50 --streams 500

The engine is measured first in this process, then a server of the same model in a process of its own, by a client that
does nothing but read its sockets. Without a model, the embedded one.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time

PROMPT = "Tell me a story about a fox and a crow."


def percentiles(seconds):
    ordered = sorted(1000 * each for each in seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"p50 {statistics.median(ordered):.1f} ms, p99 {p99:.1f} ms"


async def at_rate(ask, rate, num_requests):
    """Starts requests at a fixed rate; returns the seconds of each."""

    async def timed(delay_s):
        await asyncio.sleep(delay_s)
        began = time.perf_counter()
        await ask()
        return time.perf_counter() - began

    return await asyncio.gather(*(timed(index / rate) for index in range(num_requests)))


async def tokens_per_s(ask, num_streams):
    began = time.perf_counter()
    counts = await asyncio.gather(*(ask() for _ in range(num_streams)))
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
            received = (received + piece)[-200:]
        writer.close()
        assert b"data: [DONE]" in received, received
        return self.max_tokens


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def start_server(arguments, port):
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
    process = subprocess.Popen(command, env=os.environ)
    while True:
        assert process.poll() is None
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                if b" 200 " in connection.recv(100):
                    return process
        except OSError:
            pass
        time.sleep(0.5)


async def measure(name, make, arguments):
    for _ in range(3):
        await asyncio.gather(*(make(16)() for _ in range(8)))
    seconds = await at_rate(make(16), arguments.rate, arguments.requests)
    print(f"{name}: {arguments.rate} requests/s of 16 tokens: {percentiles(seconds)}", flush=True)
    rate = await tokens_per_s(make(64), arguments.streams)
    print(f"{name}: {arguments.streams} streams of 64 tokens: {rate:.0f} tokens/s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seqs", type=int, default=32)
    arguments = parser.parse_args()
    from torchax_serve import EngineOptions, serve

    with serve(arguments.model, engine=EngineOptions(max_num_seqs=arguments.seqs, max_num_waiting=1000)) as model:
        model.engine.warm_up()
        asyncio.run(measure("engine", lambda num_tokens: EngineClient(model, num_tokens), arguments))
    port = free_port()
    process = start_server(arguments, port)
    try:
        asyncio.run(measure("server", lambda num_tokens: HttpClient(port, num_tokens), arguments))
        held = {"guided_regex": "[a-z ]{400}", "ignore_eos": None}
        for name, fields in (("plain", {}), ("structured", held)):
            rate = asyncio.run(tokens_per_s(HttpClient(port, 64, **fields), 32))
            rate = asyncio.run(tokens_per_s(HttpClient(port, 64, **fields), 32))
            print(f"server, 32 {name} streams of 64 tokens: {rate:.0f} tokens/s", flush=True)
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
