"""What a verify step of speculation costs on a v6e beside a decode step, by the compiler's own estimates.

    python benchmarks/verify_schedule.py              # all shapes; needs the extra plan; results/verify-schedule.json
    python benchmarks/verify_schedule.py llama-8b     # one shape
    python benchmarks/verify_schedule.py attention    # the kernel of the shape llama-8b, eight rows

A verify step computes the last token of each row and k drafts, with the logits and best tokens of all of them. Its
program and that of a decode step are compiled with two and with four layers; the difference is what two layers take,
and stands for the others. Cycles are those that the compiler estimates of each operation for its own scheduling,
without waiting for weights that are copied ahead. It has no estimate of a Pallas kernel: the writes of pages are not
counted, and attention is told apart, in bundles of the kernel's schedule over the cycles in which the pages are read.
Decode attention takes less than that (`tests/aot/test_tpu_schedule.py`); that of several tokens has a way for rows
within 16 tokens of a step, and one for others.
"""

import importlib.metadata
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model_adapters.loading.model_class import module_of
from torchax_serve.distributed.mesh import mesh_of
from torchax_serve.planning.abstract_model import abstract_model
from torchax_serve.planning.cache_sizes import CacheSizes
from torchax_serve.planning.compiled_steps import compile_step
from torchax_serve.planning.executors import planned_executor
from torchax_serve.planning.topology import compiling_for, describe
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler import SpeculativeConfig

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "verify-schedule.json"
SHAPES = ("qwen3-184m", "llama-8b")
ROWS = (1, 8)
NUM_DRAFTS, MAX_LEN, PAGE_SIZE, TOPOLOGY = 4, 2048, 64, "v6e:2x2"
FEW, MORE = 2, 4
"""Layers that are compiled."""
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
    drafts = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": NUM_DRAFTS})
    with compiling_for(chip):
        planned = planned_executor(runtime, model.sharding, PAGE_SIZE, MAX_LEN, num_rows, drafts)
        cache, num_slots = CacheSizes(model, chip, planned, PAGE_SIZE, MAX_LEN, num_rows).plan()
        return model, chip, tuple(planned.steps(cache, num_slots, ()))


def cycles_of(settings, num_rows, num_layers):
    """Returns the cycles of both steps of a model with `num_layers` layers, by name."""
    settings = settings | {"num_hidden_layers": num_layers}
    model, chip, steps = steps_of(AutoConfig.for_model(settings.pop("model_type"), **settings), num_rows)
    texts = {step.name: compile_step(step, model, chip)[1].as_text() for step in steps}
    return {name: sum(map(int, CYCLES.findall(text))) for name, text in texts.items()}


def row_of(shape, num_rows):
    """Returns the cycles of both steps."""
    settings = json.loads((HERE / "shapes" / f"{shape}.json").read_text())
    few, more = (cycles_of(settings, num_rows, num_layers) for num_layers in (FEW, MORE))
    others = settings["num_hidden_layers"] - FEW
    cycles = {name: few[name] + (more[name] - few[name]) * others // (MORE - FEW) for name in few}
    return row_with(shape, num_rows, cycles)


def row_with(shape, num_rows, cycles):
    """Returns a row of the results."""
    times = cycles["verify"] / cycles["decode"]
    sizes = {"shape": shape, "num_rows": num_rows, "num_drafts": NUM_DRAFTS, "max_model_len": MAX_LEN}
    return {**sizes, "cycles": cycles, "times": round(times, 3), "met": times <= MOST}


def attention(dumps):
    """Returns what a block of pages takes on either way of the kernel, over the time of reading it."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true"
    sys.path.insert(0, str(HERE.parent / "tests" / "aot"))
    from tpu_shapes import CHIPS, Shape, compile_call

    from model_adapters.ops.tpu.page_buffers import Blocks
    from model_adapters.ops.tpu.ragged_paged_attention import MAX_KEYS, MAX_KEYS_BYTES

    shape = Shape(rows=8, num_tokens=8 * (NUM_DRAFTS + 1), capacity=MAX_LEN, num_pages=257)
    compile_call("paged_attention", shape, "v6e")
    paths = Path(dumps).glob("*paged_attention*-final_bundles.txt")
    (path,) = [path for path in paths if "schedule-analysis" not in path.name]
    block = Blocks.of(shape.pool, MAX_LEN // shape.page, MAX_KEYS, MAX_KEYS_BYTES).length
    num_bytes = block * shape.heads * shape.width * shape.pool.dtype.itemsize
    read = num_bytes / CHIPS["v6e"].hbm_gb_per_s * CHIPS["v6e"].clock_ghz
    narrow, wide = (round(bundles / read, 2) for bundles in block_bundles(path.read_text(), shape.heads))
    return {"within 16 tokens": narrow, "across": wide}


def block_bundles(text, num_heads):
    """Returns bundles of a block of pages on each way: a loop with two inside, one of which runs for each head."""
    from tpu_schedule import PRODUCT, is_within, loops_of, read_bundles

    bundles = read_bundles(text)
    loops = [
        loop for loop in loops_of(bundles) if any(PRODUCT.search(body) for _, _, body in bundles[slice(*loop[:2])])
    ]
    for outer in (loop for loop in loops if loop[2] == 2):
        masked, seen = (end - begin for begin, end, depth in loops if depth == 3 and is_within((begin, end), outer))
        yield outer[1] - outer[0] - masked - seen + num_heads * max(masked, seen)


def main():
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    found |= {"topology": TOPOLOGY, "most": MOST}
    found["versions"] = {name: importlib.metadata.version(name) for name in VERSIONS}
    for shape in sys.argv[1:] or SHAPES:
        if shape == "attention":
            with tempfile.TemporaryDirectory() as dumps:
                found["attention"] = attention(dumps)
        for num_rows in ROWS if shape != "attention" else ():
            row = row_of(shape, num_rows)
            print(json.dumps(row), flush=True)
            others = [each for each in found["rows"] if (each["shape"], each["num_rows"]) != (shape, num_rows)]
            found["rows"] = [*others, row]
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
