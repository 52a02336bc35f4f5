"""Tokens per second with and without speculation, for text that quotes its prompt and text that does not repeat.

    python benchmarks/speculation.py MODEL [--dtype bfloat16] [--rows 1,8] [--rounds 5] [--num-speculative-tokens 4]

Both engines answer the same requests in turn, in one process. Answers are compared token by token: with
`batch_invariant` they have to be the same. Reported are medians of wall seconds and of processor seconds for a batch,
and their ratios; on a machine with other work the processor's are the ones to read.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from pathlib import Path

TEXT = (
    "The old harbour of Lindholm was built in 1734 by a merchant named Erik Falk. It has four stone piers, a "
    "lighthouse with a red lantern, and a customs house that was turned into a museum in 1981. Every June the town "
    "holds a regatta, in which some ninety boats from six countries take part. The winner gets a silver bowl and a "
    "barrel of herring. "
)
QUOTE = "Repeat the following text word for word, then repeat it again.\n\n{text}"


def prompts_of(model, kind: str, num_rows: int) -> list[list[int]]:
    """Prompts that differ from row to row: to be quoted, or of random tokens."""
    if kind != "quote":
        generator = random.Random(num_rows)
        return [[generator.randrange(1000, 20000) for _ in range(96)] for _ in range(num_rows)]
    sentences = TEXT.split(". ")
    prompts = []
    for row in range(num_rows):
        text = ". ".join(sentences[row % 3 :] + sentences[: row % 3])
        chat = [{"role": "user", "content": QUOTE.format(text=text)}]
        prompts.append(model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    return prompts


def measure(models, kind: str, num_rows: int, options: argparse.Namespace) -> dict[str, object]:
    """Tokens, drafts and median seconds of one batch, answered in turns by both of `models`."""
    from torchax_serve import SamplingParams

    prompts = prompts_of(models["plain"], kind, num_rows)
    # Random prompts have random answers, if they are sampled; nothing in them repeats.
    sampling = {"temperature": 1.5, "do_sample": True} if kind == "random" else {"temperature": 0.0}
    params = [
        SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True, seed=row, **sampling)
        for row in range(num_rows)
    ]
    seconds = {name: [] for name in models}
    answers = {}
    before = models["speculative"].engine.stats().scheduler
    for turn in range(options.rounds + 1):
        for name in sorted(models, reverse=turn % 2 == 1):
            wall, cpu = time.perf_counter(), time.process_time()
            answers[name] = [answer.token_ids for answer in models[name].generate_batch(prompts, params)]
            took = time.perf_counter() - wall, time.process_time() - cpu
            if turn:  # the first one compiles
                seconds[name].append(took)
    after = models["speculative"].engine.stats().scheduler
    medians = {name: [statistics.median(x) for x in zip(*took, strict=True)] for name, took in seconds.items()}
    return {
        "text": kind,
        "rows": num_rows,
        "same_tokens": answers["plain"] == answers["speculative"],
        "drafted": after.num_draft_tokens - before.num_draft_tokens,
        "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
        **{f"{name}_wall_s": median[0] for name, median in medians.items()},
        **{f"{name}_cpu_s": median[1] for name, median in medians.items()},
        "wall_ratio": medians["plain"][0] / medians["speculative"][0],
        "cpu_ratio": medians["plain"][1] / medians["speculative"][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--draft-model", help="folder of a model that drafts, in place of prompt lookup")
    parser.add_argument("--kinds", default="quote,random", help="quote, random, greedy (random prompts, best tokens)")
    parser.add_argument("--output", type=Path, help="also write the numbers here, as JSON")
    options = parser.parse_args()

    from torchax_serve import EngineOptions, serve
    from torchax_serve.bench.machine import Machine

    sizes = {"max_model_len": 1024, "max_num_seqs": 8, "batch_invariant": True, "enable_prefix_caching": False}
    speculative = {"method": "ngram", "num_speculative_tokens": options.num_speculative_tokens}
    if options.draft_model:
        speculative |= {"method": "draft_model", "model": options.draft_model}
    models = {
        "plain": serve(options.model, dtype=options.dtype, engine=EngineOptions(**sizes)),
        "speculative": serve(
            options.model, dtype=options.dtype, engine=EngineOptions(**sizes, speculative=speculative)
        ),
    }
    results = []
    for kind in options.kinds.split(","):
        for num_rows in map(int, options.rows.split(",")):
            results.append(measure(models, kind, num_rows, options))
            print(json.dumps(results[-1]), flush=True)
    if options.output:
        report = {"command": shlex.join(["python", *sys.argv]), "machine": str(Machine.here()), "results": results}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    for model in models.values():
        model.close()


if __name__ == "__main__":
    main()
