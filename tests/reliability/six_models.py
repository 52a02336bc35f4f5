"""Six models in memory for two: random requests, each answered as by a server of its own; then servers that are killed.

    python tests/reliability/six_models.py [--requests 2000] [--kills 12]

Every model is first asked everything by a server that holds it alone. Then one server of all six, of which two are
loaded at a time, has the requests in a random order: whole answers and streams, chats and texts. At last servers of
the six are killed at random moments of their start, of loading and of answering, and what is left is looked for:
processes, temporary files, shared memory, files of the cache without a seal; the next server answers the same.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import Process

from model_adapters.loading.model_source import EMBEDDED

NAMES = "abcdef"
QUESTIONS = ("Hi", "What is 3 + 4?", "Name a color", "7 + 8 =", "Once upon a time", "The capital of France")
MAX_TOKENS = 12
NUM_CLIENTS = 24
ENGINE = ("--max-model-len", "256", "--max-num-seqs", "16")


def write_models(root):
    """Six models of other weights."""
    for number, name in enumerate(NAMES):
        shutil.copytree(EMBEDDED, root / name)
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
        with torch.no_grad():
            torch.manual_seed(number)
            for weight in model.parameters():
                weight.add_(0.5 * weight.std() * torch.randn_like(weight))
        model.save_pretrained(root / name)


def ask(client, name, question, kind):
    """The text of an answer, and how it ended."""
    body = {"model": name, "max_tokens": MAX_TOKENS, "temperature": 0}
    if kind == "text":
        choice = (
            client.post("/v1/completions", json=body | {"prompt": question}).raise_for_status().json()["choices"][0]
        )
        return choice["text"], choice["finish_reason"]
    body["messages"] = [{"role": "user", "content": question}]
    if kind == "chat":
        choice = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    text, reason, is_whole = "", None, False
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        for line in answer.raise_for_status().iter_lines():
            is_whole |= line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "choices" in event, event
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
    assert is_whole, f"the stream of {name} was cut"
    return text, reason


KINDS = ("text", "chat", "stream")
ALL = [(name, question, kind) for name in NAMES for question in QUESTIONS for kind in KINDS]


def server_of(root, names, environment):
    several = ["--max-loaded-models", "2"] if len(names) > 1 else []
    return Process(*(f"{name}={root / name}" for name in names), *several, *ENGINE, "--no-access-log", **environment)


def client_of(server):
    return httpx.Client(base_url=server.url, timeout=300)


def answers_alone(root, environment):
    found = {}
    for name in NAMES:
        server = server_of(root, [name], environment).wait_until_ready()
        try:
            with client_of(server) as client:
                found |= {each: ask(client, *each) for each in ALL if each[0] == name}
        finally:
            server.stop()
    texts = collections.Counter(text for text, _ in found.values())
    print(f"{len(found)} different requests, {len(texts)} different answers", flush=True)
    return found


def measure(root, environment, expected, num_requests):
    """Sends the requests in a random order; returns the figures."""
    chooser = random.Random(0)
    asked = [chooser.choice(ALL) for _ in range(num_requests)]
    server = server_of(root, NAMES, environment).wait_until_ready()
    lines = []
    log = threading.Thread(target=lambda: lines.extend(server.process.stderr))  # what nobody reads would stop it
    log.start()
    try:
        began = time.monotonic()
        with client_of(server) as client, concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
            found = list(pool.map(lambda each: _timed(client, each), asked))
        took_s = time.monotonic() - began
        with client_of(server) as client:
            rows = client.get("/v1/models").raise_for_status().json()["data"]
        memory = server.memory_bytes()
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(60)
        log.join(60)
    finally:
        server.stop()
    wrong = [
        (each, answer, expected[each])
        for each, (answer, _) in zip(asked, found, strict=True)
        if answer != expected[each]
    ]
    times = sorted(seconds for _, seconds in found)
    return {
        "num_requests": num_requests,
        "num_failed": sum(isinstance(answer, Exception) for answer, _ in found),
        "num_wrong": len(wrong),
        "first_wrong": repr(wrong[:2]),
        "errors": [line.strip()[:300] for line in lines if " ERROR " in line][:5],
        "num_loads": sum("was loaded in" in line for line in lines),
        "num_loaded": sum(row["status"]["value"] == "loaded" for row in rows),
        "took_s": round(took_s, 1),
        "median_s": round(times[len(times) // 2], 2),
        "longest_s": round(times[-1], 2),
        "memory_mib": memory >> 20,
        "status": status,
    }


def _timed(client, each):
    began = time.monotonic()
    try:
        found = ask(client, *each)
    except (httpx.HTTPError, AssertionError) as error:
        found = error
    return found, time.monotonic() - began


def kill(root, environment, expected, chooser, *, is_late):
    """Kills a server: within seconds of its start, or of its first answer; returns what is left of it."""
    server = server_of(root, NAMES, environment)
    num_answers = 0
    if is_late:
        server.wait_until_ready()
        with client_of(server) as client:
            assert ask(client, *(first := chooser.choice(ALL))) == expected[first]
        num_answers += 1
    delay_s = chooser.uniform(0.2, 12.0)
    until = time.monotonic() + delay_s
    with client_of(server) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(_until_killed, client, until, random.Random(chooser.random())) for _ in range(4)]
        time.sleep(delay_s)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        for task in tasks:
            for each, answer in task.result():
                num_answers += 1
                assert answer == expected[each], (each, answer)
    server.process.communicate()
    _, alive = psutil.wait_procs(children, 5)
    return delay_s, num_answers, len(children), [each.cmdline() for each in alive]


def _until_killed(client, until, chooser):
    found = []
    while time.monotonic() < until:
        each = chooser.choice(ALL)
        try:
            found.append((each, ask(client, *each)))
        except (httpx.HTTPError, AssertionError):  # not there yet, or killed in an answer
            time.sleep(0.05)
    return found


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root, cache, scratch = Path(name) / "models", Path(name) / "cache", Path(name) / "tmp"
        root.mkdir()
        scratch.mkdir()
        kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchax-serve" / "kernels"
        if kernels.is_dir():
            shutil.copytree(kernels, cache / "torchax-serve" / "kernels")
        write_models(root)
        environment = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(scratch)}
        expected = answers_alone(root, environment)
        print(json.dumps(measure(root, environment, expected, arguments.requests)), flush=True)
        shared, before = files(Path("/dev/shm")), files(cache)
        chooser = random.Random(1)
        num_left = 0
        for number in range(arguments.kills):
            # A new cache for each second one: it is killed while programs are compiled and stored.
            if chooser.random() < 0.5:
                shutil.rmtree(cache / "torchax-serve" / "compiled", ignore_errors=True)
            is_late = number % 3 != 0  # a third of them in the start
            delay_s, num_answers, num_children, alive = kill(root, environment, expected, chooser, is_late=is_late)
            left = {
                "processes": alive,
                "temporary": sorted(files(scratch)),
                "shared": sorted(files(Path("/dev/shm")) - shared),
            }
            left["partial"] = sorted(each for each in files(cache) - before if Path(each).name.startswith("."))
            num_left += any(left.values())
            when = f"{delay_s:.1f} s after its {'first answer' if is_late else 'start'}"
            print(f"killed {when}, {num_answers} answers, {num_children} children: {left}", flush=True)
        print(json.dumps(measure(root, environment, expected, 60)), flush=True)
        print(f"{num_left} of {arguments.kills} left something behind")


if __name__ == "__main__":
    main()
