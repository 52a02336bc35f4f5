"""How often a greedy request gets other tokens in a batch than by itself.

    python benchmarks/invariance.py [--dtype bfloat16] [--requests 32] [--new-tokens 64]

Every prompt runs by itself and then all run at once, on the same engine without prefix caching, so that prompts are
cut and rows are padded differently. Random weights give nearly flat distributions, where ties are far more frequent
than in a trained model: the numbers are an upper bound of what to expect.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

SHAPE = Path(__file__).parent / "shapes" / "qwen3-184m.json"


def tokens_of(model, options: argparse.Namespace, generator) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the same random prompts, each by itself and all at once."""
    import torch
    from transformers import GenerationConfig

    from torchax_serve.request_params import RequestParams
    from torchax_serve.scheduler import Request

    vocab_size = model.config.vocab_size
    lengths = torch.randint(options.prompt_len // 2, options.prompt_len, (options.requests,), generator=generator)
    params = RequestParams.of_generation_config(GenerationConfig(max_new_tokens=options.new_tokens), seed=0)
    requests = [
        Request.of(torch.randint(vocab_size, (int(length),), generator=generator).tolist(), params)
        for length in lengths
    ]
    single = [model.engine.submit(request).result() for request in requests]
    handles = [model.engine.submit(request) for request in requests]
    return single, [handle.result() for handle in handles]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=SHAPE)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--fast", action="store_true", help="without EngineOptions(batch_invariant=True)")
    parser.add_argument("--output", type=Path, help="also write the numbers here, as JSON")
    options = parser.parse_args()

    import torch

    from torchax_serve import EngineOptions, serve
    from torchax_serve.bench.machine import Machine

    generator = torch.Generator().manual_seed(0)
    rows = []
    for dtype in options.dtype:
        layout = EngineOptions(
            max_model_len=2 * (options.prompt_len + options.new_tokens),
            enable_prefix_caching=False,
            batch_invariant=not options.fast,
        )
        with serve(options.config, random_weights=True, dtype=dtype, engine=layout) as model:
            pairs = list(zip(*tokens_of(model, options, generator), strict=True))
        same = [a == b for a, b in pairs]
        shared = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs]
        rows.append(
            {
                "dtype": dtype,
                "requests": options.requests,
                "identical": sum(same),
                "tokens_before_the_first_difference": sum(shared),
                "differences_per_1000_tokens": 1000 * (len(same) - sum(same)) / sum(shared),
            }
        )
        print(rows[-1], flush=True)
    if options.output:
        command = shlex.join(["python", *sys.argv])
        report = {"command": command, "machine": str(Machine.here()), "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
