"""Time to first token of prompts whose prefixes the device had to evict: loaded from host memory, and computed again.

    python benchmarks/kv_offloading.py FOLDER                        # a checkpoint folder
    python benchmarks/kv_offloading.py FOLDER --out results.json

Two engines of one model, with and without `kv_offloading_bytes`, answer the same prompts in turns, one request at a
time. The device has pages for half of the prompts, so each prompt finds its prefix evicted. Medians over all prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

PAGE_SIZE = 16


def first_token_s(model: Any, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and processor seconds of the process until the answer's end."""
    from torchax_serve import SamplingParams

    began, spent = time.perf_counter(), time.process_time()
    stream = model.iter_tokens(prompt, params=SamplingParams(max_new_tokens=1, temperature=0.0))
    next(iter(stream))
    first = time.perf_counter() - began
    list(stream)
    return first, time.process_time() - spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    import numpy as np

    from torchax_serve import EngineOptions, serve
    from torchax_serve.bench.machine import Machine

    rng = np.random.default_rng(0)
    sizes = {"max_model_len": options.prompt_len + 64, "max_num_seqs": 1, "page_size": PAGE_SIZE}
    with serve(options.folder, engine=EngineOptions(**sizes)) as probe:
        plan = probe.engine._runner._cache.plan
        vocab_size = probe.config.vocab_size
    page_bytes = sum(shape.page_bytes(PAGE_SIZE) for shape in plan.shapes)
    pages = -(-(options.prompt_len + 1) // PAGE_SIZE)
    sizes["kv_cache_memory_bytes"] = (options.num_prompts // 2 * pages + 1) * page_bytes
    prompts = [rng.integers(3, vocab_size, options.prompt_len).tolist() for _ in range(options.num_prompts)]
    results: dict[str, Any] = {}
    num_bytes = 2 * options.num_prompts * pages * page_bytes
    loaded = serve(options.folder, engine=EngineOptions(**sizes, kv_offloading_bytes=num_bytes))
    computed = serve(options.folder, engine=EngineOptions(**sizes))
    with loaded, computed:
        models = {"loaded": loaded, "computed": computed}
        for model in models.values():
            model.engine.warm_up()
            for prompt in prompts:
                first_token_s(model, prompt)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for _ in range(options.rounds):
            for prompt in prompts:
                for name, model in models.items():
                    times[name].append(first_token_s(model, prompt))
        for name, model in models.items():
            scheduler = model.stats().scheduler
            results[name] = {
                "first_token_s": round(statistics.median(first for first, _ in times[name]), 4),
                "processor_s": round(statistics.median(spent for _, spent in times[name]), 4),
                "hit_tokens": scheduler.num_hit_tokens,
                "pages_loaded": scheduler.pages[0].num_loaded,
            }
    results["page_bytes"], results["prompt_len"] = page_bytes, options.prompt_len
    results["command"] = shlex.join(["python", "benchmarks/kv_offloading.py", *sys.argv[1:]])
    results["machine"] = dataclasses.asdict(Machine.here())
    print(json.dumps(results, indent=2))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
