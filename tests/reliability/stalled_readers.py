"""Clients that do not read, next to clients that do; a command, since it compares times.

    python tests/reliability/stalled_readers.py --stalled 200

A server of the embedded model runs in a process of its own. Requests of 16 tokens come at a fixed rate, in turns
without and with so many streams that nobody reads; medians of the turns' 50th and 99th percentiles are printed.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import Process

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
PLAIN = {"model": "tiny", "prompt": "Once upon a time", "ignore_eos": True, "stream": True}


def request_bytes(**fields):
    data = json.dumps({**PLAIN, **fields})
    return f"{HEAD}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode()


async def ask(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(max_tokens=16))
    began = time.perf_counter()
    answer = await reader.read(-1)
    writer.close()
    assert b"[DONE]" in answer, answer
    return time.perf_counter() - began


async def turn(port, rate, num_requests):
    async def later(index):
        await asyncio.sleep(index / rate)
        return await ask(port)

    seconds = sorted(await asyncio.gather(*(later(index) for index in range(num_requests))))
    return 1000 * statistics.median(seconds), 1000 * seconds[int(0.99 * len(seconds))]


def stall(port, num_clients):
    """Opens streams whose answers fill the socket's buffers."""
    held = []
    for _ in range(num_clients):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request_bytes(max_tokens=400, logprobs=20))
        held.append(connection)
    return held


def metric(port, name):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    (value,) = (line.split()[1] for line in text.splitlines() if line.startswith(f"torchax_serve_{name} "))
    return float(value)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stalled", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections; or 2.5 MB fit into each
    process = Process("--served-model-name", "tiny", "--no-access-log", "--max-num-waiting", "1000", listener=listener)
    found = {"without": [], "with": []}
    try:
        process.wait_until_ready()
        asyncio.run(turn(process.port, arguments.rate, 50))  # compiles
        for _ in range(arguments.turns):
            found["without"].append(asyncio.run(turn(process.port, arguments.rate, arguments.requests)))
            held = stall(process.port, arguments.stalled)
            while metric(process.port, "num_requests_running") or metric(process.port, "num_requests_waiting"):
                time.sleep(0.5)  # their tokens are computed; their answers wait to be read
            num_stalled = metric(process.port, "http_in_flight") - 1
            assert num_stalled == arguments.stalled, f"{num_stalled} answers wait for their readers"
            found["with"].append(asyncio.run(turn(process.port, arguments.rate, arguments.requests)))
            for connection in held:
                connection.close()
            print(f"{num_stalled:.0f} answers waited for their readers", flush=True)
            while metric(process.port, "http_in_flight") > 1:
                time.sleep(0.5)
    finally:
        process.stop()
    for name, turns in found.items():
        p50, p99 = (statistics.median(column) for column in zip(*turns, strict=True))
        print(f"{name} {arguments.stalled} stalled readers: p50 {p50:.1f} ms, p99 {p99:.1f} ms")


if __name__ == "__main__":
    main()
