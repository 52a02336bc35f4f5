"""A bundle beside the model it was exported from: decoding in turns, and seconds from process start to first token.

python benchmarks/bundle.py ./qwen3-184m                  # a folder of transformers
python benchmarks/bundle.py --rounds 5 --out results.json ./qwen3-184m

Decoding runs in one process, the engine and the bundle in turns. Each start is a process of its own; those of the model
are starts from its record, as every start after the first one. Two starts of each are not counted. Random weights in
bfloat16 have best tokens that are equally likely to the bit; where one is chosen, a step with other requests may choose
the other one.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from torchax_serve import EngineOptions, SamplingParams, serve

ENGINE = EngineOptions(max_model_len=512, max_num_seqs=8)
START = """
import json, os, sys, time
from torchax_serve import EngineOptions, SamplingParams, serve
kind, path = sys.argv[1:]
engine = EngineOptions(max_model_len=512, max_num_seqs=8) if kind == "model" else None
model = serve(path, engine=engine)
params = SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True)
first = next(model.iter_tokens([5, 6, 7, 8], params=params))
now, used = time.time(), os.times()
print(json.dumps([now, used.user + used.system, first, "torch" in sys.modules]), flush=True)
os._exit(0)
"""


def started(kind, path):
    began = time.time()
    done = subprocess.run([sys.executable, "-c", START, kind, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    now, cpu_s, first, has_torch = json.loads(done.stdout.splitlines()[-1])
    return now - began, cpu_s, first, has_torch


def starts(model, bundle, rounds):
    """Medians of wall and processor seconds of starts, and of the ratios of each round."""
    found = {"model": [], "bundle": []}
    for number in range(rounds + 2):
        order = [("model", model), ("bundle", bundle)]
        for kind, path in order if number % 2 else reversed(order):
            row = started(kind, path)
            if number >= 2:
                found[kind].append(row)
        if number == 0:
            time.sleep(10)  # the first start of the model writes its record after its answer
    assert len({row[2] for rows in found.values() for row in rows}) == 1, "the first tokens differ"
    assert not any(row[3] for row in found["bundle"])
    result = {}
    for column, name in ((0, "wall"), (1, "processor")):
        for kind, rows in found.items():
            result[f"{kind}_{name}_s"] = round(statistics.median(row[column] for row in rows), 3)
        pairs = zip(found["bundle"], found["model"], strict=True)
        result[f"{name}_ratio"] = round(statistics.median(ours[column] / theirs[column] for ours, theirs in pairs), 3)
    return result


def tokens_per_s(model, prompts, num_tokens):
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0, ignore_eos=True)
    streams = [model.iter_tokens(prompt, params=params) for prompt in prompts]
    tokens = [[next(stream)] for stream in streams]
    began = time.perf_counter()
    for stream, found in zip(streams, tokens, strict=True):
        found.extend(stream)
    return len(prompts) * (num_tokens - 1) / (time.perf_counter() - began), tokens


def decoding(model, bundle, rounds, num_tokens):
    """Medians of decode tokens/s by number of requests; the engine with and without compressed weights."""
    result = {}
    with (
        serve(model, engine=ENGINE, pack_weights=False) as dense,
        serve(model, engine=ENGINE) as compressed,
        serve(bundle) as exported,
    ):
        sides = {"engine": dense, "engine_compressed": compressed, "bundle": exported}
        for number in (1, 8):
            rates, random, equal = {name: [] for name in sides}, np.random.default_rng(0), 0
            for turn in range(rounds + 1):
                prompts = random.integers(0, exported.engine.vocab_size, (number, 16)).tolist()
                answers = {}
                for name in sides if turn % 2 else reversed(sides):
                    rate, answers[name] = tokens_per_s(sides[name], prompts, num_tokens)
                    if turn:
                        rates[name].append(rate)
                equal += sum(map(list.__eq__, answers["bundle"], answers["engine"]))
            result[str(number)] = {name: round(statistics.median(each), 1) for name, each in rates.items()}
            result[str(number)]["equal_answers"] = f"{equal} of {number * (rounds + 1)}"
            for name in ("engine", "engine_compressed"):
                pairs = zip(rates["bundle"], rates[name], strict=True)
                result[str(number)][f"over_{name}"] = round(statistics.median(a / b for a, b in pairs), 3)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        with serve(given.model, engine=ENGINE, pack_weights=False) as model:
            began = time.perf_counter()
            model.export(bundle, reference=False)
            export_s = time.perf_counter() - began
        results = {"export_s": round(export_s, 2), "starts": starts(given.model, bundle, given.rounds)}
        print(json.dumps(results), flush=True)
        results["decode_tokens_per_s"] = decoding(given.model, bundle, given.rounds, given.new_tokens)
        print(json.dumps(results["decode_tokens_per_s"]), flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    report = {"jax": jax.__version__, "machine": machine, "rounds": given.rounds, **results}
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
