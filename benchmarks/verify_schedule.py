"""What a verify step of speculation costs on a v6e beside a decode step, by the compiler's own estimates.

    python benchmarks/verify_schedule.py              # all shapes; needs the extra plan; results/verify-schedule.json
    python benchmarks/verify_schedule.py llama-8b     # one shape

A verify step computes the last token of each row and k drafts, with the logits and best tokens of all of them. Its
program and that of a decode step are compiled for models of 2 and of 4 layers: what two layers add is what all others
cost. Cycles are those that the compiler estimates of each operation for its own scheduling. It has no estimate of a
Pallas kernel, so that attention and the writes of its pages are not among them.
"""

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model_adapters.loading.model_class import module_of
from torchax_serve.distributed.mesh import mesh_of
from torchax_serve.executors.base import AbstractStep, abstract_ints
from torchax_serve.executors.packed import PackedExecutor
from torchax_serve.kv_cache.pools import PagedCache
from torchax_serve.planning.abstract_model import abstract_model
from torchax_serve.planning.cache_sizes import CacheSizes
from torchax_serve.planning.compiled_steps import compile_step
from torchax_serve.planning.executors import AbstractPages, planned_executor
from torchax_serve.planning.topology import compiling_for, describe
from torchax_serve.runtime.model_runtime import ModelRuntime

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "verify-schedule.json"
SHAPES = ("qwen3-184m", "llama-8b")
ROWS = (1, 8)
NUM_DRAFTS, MAX_LEN, PAGE_SIZE, TOPOLOGY = 4, 2048, 64, "v6e:2x2"
LAYERS = (2, 4)
MOST = 1.15
"""Cycles of a verify step over those of a decode step, at most."""
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
VERSIONS = ("jax", "libtpu", "torchax", "transformers")


def steps_of(config, num_rows):
    """Returns the abstract model, the chip, and the decode and the verify step."""
    chip, devices = describe(TOPOLOGY)
    mesh = mesh_of(devices[:1], {"data": 1, "model": 1, "expert": 1})
    module = module_of(AutoModelForCausalLM._model_mapping[type(config)], config, torch.bfloat16)
    model = abstract_model(module, mesh, chip=chip)
    runtime = ModelRuntime(module, model.weights, sharding=model.sharding)
    with compiling_for(chip):
        planned = planned_executor(runtime, model.sharding, PAGE_SIZE, MAX_LEN, num_rows)
        cache, num_slots = CacheSizes(model, chip, planned, PAGE_SIZE, MAX_LEN, num_rows).plan()
        sizes = {"num_slots": num_slots, "token_budget": 256}
        pages = PagedCache(cache, AbstractPages(model.sharding))
        executor = PackedExecutor(runtime.program, runtime.weights, pages, runtime.steps.executables, **sizes)
    (decode,) = executor.abstract_steps(())
    num_tokens = num_rows * (NUM_DRAFTS + 1)
    spec = executor._specs.of_drafts(num_rows, num_tokens)

    def verify(weights, pools, last_tokens, numbers):
        logits, pools, _ = executor._forward(weights, pools, spec.unpack(numbers, last_tokens), spec)
        return logits, pools

    ints = [abstract_ints(model.sharding, size) for size in (num_slots, spec.size)]
    args = (executor.cache.pools, *ints)
    more = AbstractStep("verify", num_tokens, num_rows, MAX_LEN, 0, verify, args, (0,))
    return model, chip, (decode, more)


def cycles_of(shape, num_layers, num_rows):
    """Returns the cycles of a decode and of a verify step."""
    settings = json.loads((HERE / "shapes" / f"{shape}.json").read_text()) | {"num_hidden_layers": num_layers}
    model, chip, steps = steps_of(AutoConfig.for_model(settings.pop("model_type"), **settings), num_rows)
    found = {}
    for step in steps:
        text = compile_step(step, model, chip)[1].as_text()
        found[step.name] = sum(map(int, CYCLES.findall(text)))
        print(step.name, found[step.name], flush=True)
    return found


def row_of(shape, num_rows):
    """Returns the cycles of both steps with all layers."""
    total = json.loads((HERE / "shapes" / f"{shape}.json").read_text())["num_hidden_layers"]
    few, more = LAYERS
    before, after = (cycles_of(shape, num_layers, num_rows) for num_layers in LAYERS)
    cycles = {name: before[name] + (after[name] - before[name]) * (total - few) // (more - few) for name in before}
    times = cycles["verify"] / cycles["decode"]
    sizes = {"shape": shape, "num_rows": num_rows, "num_drafts": NUM_DRAFTS, "max_model_len": MAX_LEN}
    return {**sizes, "cycles": cycles, "times": round(times, 3), "met": times <= MOST}


def main():
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    for shape in sys.argv[1:] or SHAPES:
        for num_rows in ROWS:
            row = row_of(shape, num_rows)
            print(json.dumps(row), flush=True)
            rows = [each for each in rows if (each["shape"], each["num_rows"]) != (shape, num_rows)] + [row]
            versions = {name: importlib.metadata.version(name) for name in VERSIONS}
            found = {"topology": TOPOLOGY, "most": MOST, "versions": versions, "rows": rows}
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
