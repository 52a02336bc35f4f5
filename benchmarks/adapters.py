"""Tokens per second of requests with adapters over those of the model alone, in turns in one process.

    python benchmarks/adapters.py --model /path/to/model --rounds 9 --out adapters.json

Two engines have the same weights: one of the model alone, one with adapters of rank 16 on all projections of attention.
A round decodes with each: one row and eight rows of the model alone, a row with an adapter, eight rows with one
adapter, eight rows with an adapter each, and eight rows without an adapter on the engine that has some. Processor time
counts all threads, so that it says something on a busy machine too. Ratios are medians over the rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from torchax_serve import EngineOptions, SamplingParams, serve

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
NUM_ADAPTERS, RANK = 8, 16
TO_REACH = {"1 row": 0.92, "8 rows, 1 adapter": 0.92, "8 rows, 8 adapters": 0.85}


def write_adapter(model, folder, seed):
    """An adapter with random matrices, as peft writes it."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, part in model.torch_model.named_modules():
        if name.endswith(TARGETS):
            num_out, num_in = part.weight.shape
            for kind, shape in (("A", (RANK, num_in)), ("B", (num_out, RANK))):
                values = rng.standard_normal(shape).astype(np.float32) / 100
                tensors[f"base_model.model.{name}.lora_{kind}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))


def timed(model, names, num_new):
    """Seconds and processor seconds of rows of `num_new` tokens with these adapters."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 1000, 16).tolist() for _ in names]
    params = [SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True, adapter=name) for name in names]
    wall, cpu = time.perf_counter(), time.process_time()
    answers = model.generate_batch(prompts, params)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert all(len(answer.token_ids) == num_new for answer in answers)
    return wall, cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="folder or name; the embedded model without it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a row")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engine = EngineOptions(max_num_seqs=8, max_model_len=256, kv_cache_memory_bytes=1 << 26)
    names = [f"a{number}" for number in range(NUM_ADAPTERS)]
    with tempfile.TemporaryDirectory() as root, serve(options.model, dtype=options.dtype, engine=engine) as alone:
        for seed, name in enumerate(names):
            write_adapter(alone, Path(root, name), seed)
        folders = {name: Path(root, name) for name in names}
        with serve(options.model, dtype=options.dtype, engine=engine, adapters=folders) as served:
            cases = {
                "1 row": (served, [names[0]]),
                "8 rows, 1 adapter": (served, [names[0]] * 8),
                "8 rows, 8 adapters": (served, names),
                "8 rows, none": (served, [None] * 8),
            }
            base = {1: (alone, [None]), 8: (alone, [None] * 8)}
            for model, rows in (*base.values(), *cases.values()):
                timed(model, rows, options.tokens)
            found = {case: [] for case in cases}
            for _ in range(options.rounds):
                before = {size: timed(*each, options.tokens) for size, each in base.items()}
                for case, (model, rows) in cases.items():
                    spent = timed(model, rows, options.tokens)
                    found[case].append([one / own for one, own in zip(before[len(rows)], spent, strict=True)])
    report = {}
    for case, ratios in found.items():
        wall, cpu = (statistics.median(each) for each in zip(*ratios, strict=True))
        report[case] = {"tokens_per_s": round(wall, 3), "tokens_per_cpu_s": round(cpu, 3)}
        wanted = f"  to reach {TO_REACH[case]}" if case in TO_REACH else ""
        print(f"{case:20} tokens/s over the model alone {wall:.3f}, by processor time {cpu:.3f}{wanted}")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
