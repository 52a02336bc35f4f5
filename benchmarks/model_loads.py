"""What loading a model costs a server that holds several: its first token, and the answers of another one meanwhile.

    python benchmarks/model_loads.py --turns 5 --output benchmarks/results/model-loads.json
    python benchmarks/model_loads.py --model FOLDER --cache FOLDER

A server has the embedded model and one of a shape with random weights, whose programs are stored by a server before.
Turn by turn the second model is loaded by a request for one token and unloaded. Shown are the seconds from that request
to its token, over those of reading its file (from the memory of the system, into an array), and the seconds of answers
of the embedded model, one after the other: at rest, and those that a load overlaps.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil

from model_adapters.loading.model_source import EMBEDDED
from server import free_port, is_ready

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ROOT / "benchmarks" / "shapes" / "qwen3-184m.json"
REST_S = 4.0
"""Seconds of answers at rest, in front of each load."""
NUM_TOKENS = 48
"""Of an answer of the embedded model."""


def write_model(folder):
    """A checkpoint of the shape with random weights, and the tokenizer of the embedded model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, folder)
    config = json.loads(SHAPE.read_text())
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def read_s(folder):
    """Seconds to read the weights' files into an array."""
    began = time.perf_counter()
    for path in folder.glob("*.safetensors"):
        array = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            view, place = memoryview(array), 0
            while place < len(view):
                place += file.readinto(view[place:])
    return time.perf_counter() - began


def start(folder, cache):
    """Returns the process of a server and a client of it."""
    port = free_port()
    names = [f"tiny={EMBEDDED}", f"big={folder}", "--port", str(port), "--max-model-len", "1024", "--no-access-log"]
    command = [sys.executable, "-c", "from torchax_serve.cli.main import main; main()", "serve", *names]
    process = subprocess.Popen(command, env={**os.environ, "XDG_CACHE_HOME": str(cache)})
    while not is_ready(port, "/readyz"):
        assert process.poll() is None
        time.sleep(0.05)
    return process, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)


def answer(client, name, num_tokens):
    """Seconds of an answer."""
    body = {"model": name, "prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
    began = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - began


class Answers(threading.Thread):
    """Answers of the embedded model, one after the other, each with its beginning and its end."""

    def __init__(self, client):
        super().__init__()
        self.client, self.found, self.is_over = client, [], False
        self.start()

    def run(self):
        while not self.is_over:
            began = time.perf_counter()
            self.found.append((began, began + answer(self.client, "tiny", NUM_TOKENS)))

    def stop(self):
        self.is_over = True
        self.join()
        return self.found


def turn(client, folder, process):
    """Loads the second model beside answers of the first, and unloads it."""
    file_s = min(read_s(folder) for _ in range(3))
    client.post("/models/unload", json={"model": "big"}).raise_for_status()
    used = sum(process.cpu_times()[:2])
    alone_s = answer(client, "big", 1)
    cpu_s = sum(process.cpu_times()[:2]) - used
    client.post("/models/unload", json={"model": "big"}).raise_for_status()
    answers = Answers(client)
    time.sleep(REST_S)
    began = time.perf_counter()
    beside_s = answer(client, "big", 1)
    ended = time.perf_counter()
    times = answers.stop()
    rest = [end - begin for begin, end in times if end < began]
    beside = [end - begin for begin, end in times if begin < ended and end > began]
    return {
        "file_s": file_s,
        "load_s": alone_s,
        "over_file_s": alone_s - file_s,
        "load_cpu_s": cpu_s,
        "load_beside_s": beside_s,
        "rest_s": statistics.median(rest),
        "beside_s": statistics.median(beside),
        "slower": statistics.median(beside) / statistics.median(rest),
        "slowest": max(beside) / statistics.median(rest),
        "slowest_at_rest": max(rest) / statistics.median(rest),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--model", type=Path, help="folder of the model that is loaded; one of the shape is written")
    parser.add_argument("--cache", type=Path, help="where programs are stored; an empty folder")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, cache = arguments.model or Path(name) / "big", arguments.cache or Path(name) / "cache"
        if arguments.model is None:
            write_model(folder)
        kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchax-serve" / "kernels"
        if kernels.is_dir() and not (cache / "torchax-serve" / "kernels").exists():
            shutil.copytree(kernels, cache / "torchax-serve" / "kernels")
        turns = []
        for number in range(2):  # the first stores the programs
            process, client = start(folder, cache)
            try:
                answer(client, "tiny", NUM_TOKENS)
                print(f"first load of server {number + 1}: {answer(client, 'big', 1):.2f} s", flush=True)
                for _ in range(arguments.turns if number else 0):
                    turns.append(turn(client, folder, psutil.Process(process.pid)))
                    print(", ".join(f"{key} {value:.2f}" for key, value in turns[-1].items()), flush=True)
            finally:
                process.terminate()
                process.wait()
    found = {key: statistics.median(each[key] for each in turns) for key in turns[0]}
    print("medians: " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()))
    if arguments.output is not None:
        from torchax_serve.bench.machine import Machine

        facts = {"command": " ".join(["python", *sys.argv]), "machine": dataclasses.asdict(Machine.here())}
        arguments.output.write_text(json.dumps(facts | {"medians": found, "turns": turns}, indent=1) + "\n")


if __name__ == "__main__":
    main()
