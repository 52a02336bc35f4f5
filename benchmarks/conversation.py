"""Time to the first token of the second turn of a conversation, over that of the first.

    python benchmarks/conversation.py CONFIG                    # config.json of a shape, or its folder
    python benchmarks/conversation.py CONFIG --context-len 8000 --out results.json

The second turn is the first one, its answer and a new message. With prefixes it computes what is new; a model with
recurrent layers goes on from a snapshot of their states. The same turns without prefixes are beside it, in turns.
Weights are random.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def first_token_s(model: Any, prompt: list[int], num_new: int) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens of the answer."""
    from torchax_serve import SamplingParams

    began = time.perf_counter()
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    stream = iter(model.iter_tokens(prompt, params=params))
    tokens = [next(stream)]
    first = time.perf_counter() - began
    return first, [*tokens, *stream]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--context-len", type=int, default=8000)
    parser.add_argument("--answer-len", type=int, default=64)
    parser.add_argument("--message-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    import numpy as np
    import torch
    import transformers

    from torchax_serve import EngineOptions, serve
    from torchax_serve.bench.machine import Machine

    config = transformers.AutoConfig.from_pretrained(options.config)
    length = options.context_len + options.answer_len + options.message_len
    sizes: dict[str, Any] = {"max_model_len": length + 64, "max_num_seqs": 1}
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    modules = [transformers.AutoModelForCausalLM.from_config(config, dtype=options.dtype).eval()]
    modules.append(copy.deepcopy(modules[0]))
    shared = serve(modules[0], engine=EngineOptions(**sizes))
    alone = serve(modules[1], engine=EngineOptions(**sizes, enable_prefix_caching=False))
    times: dict[str, list[float]] = {"first_turn": [], "second_turn": [], "second_turn_without_prefixes": []}
    with shared, alone:
        for model in (shared, alone):
            model.engine.warm_up()
        for number in range(options.rounds + 1):
            first = rng.integers(3, config.vocab_size, options.context_len).tolist()
            took, answer = first_token_s(shared, first, options.answer_len)
            second = first + answer + rng.integers(3, config.vocab_size, options.message_len).tolist()
            again, tokens = first_token_s(shared, second, 4)
            without, expected = first_token_s(alone, second, 4)
            if number:  # the first round is not timed
                for name, seconds in zip(times, (took, again, without), strict=True):
                    times[name].append(seconds)
        scheduler = shared.stats().scheduler
    medians = {name: round(statistics.median(each), 4) for name, each in times.items()}
    results = {
        "model_type": config.model_type,
        "seconds": medians,
        "second_over_first": round(medians["second_turn"] / medians["first_turn"], 4),
        "last_tokens_equal": tokens == expected,
        "hit_tokens_a_turn": scheduler.num_hit_tokens // (options.rounds + 1),
        "command": shlex.join(["python", "benchmarks/conversation.py", *sys.argv[1:]]),
        "machine": dataclasses.asdict(Machine.here()),
    }
    print(json.dumps(results, indent=2))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
