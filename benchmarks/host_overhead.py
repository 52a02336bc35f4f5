"""The host's share of a decode step at an 8-billion-parameter shape, measured where there is no accelerator.

    python benchmarks/host_overhead.py                     # batch 1, 8, 64, 256, with 1,024 and 8,192 tokens each
    python benchmarks/host_overhead.py --at-once           # the same work back to back: what it costs in warm caches
    python benchmarks/host_overhead.py --trace trace.json  # and what the engine's thread did when, for Perfetto

The engine, its scheduler, its runner and its sampler are the real ones, and so is each call of a compiled program with
all the arguments of the shape: each weight, each pool that a Llama of 8 billion parameters has. Two things stand in
(`simulated_accelerator.py`). The matrices are small and the model's forward leaves them all but unread, so that this
machine's cores are the host's. And tokens are held back until an H200 would have them: a step takes as long as its
bytes at a part of the bandwidth, or its products at that part of the rate (`--reached`). With all of it, which no
program reaches, shares are upper bounds.

"decode" are rounds in which all requests decode; "mixed" those of four times as many requests as there are slots, of
many lengths, in which some decode and others compute their prompts. "share" is the time of the engine's thread, waiting
left out, over the device's; "idle" is how long the device has nothing to do because the host has not sent it yet, over
the same. Not measured: what XLA's runtime does on its own threads to start a program's kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from generate import keep_kernels
from simulated_accelerator import VOCAB_SIZE, Accelerator, Costs, Round, RoundRecorder

FOLDER = Path(__file__).resolve().parent
SHAPE = json.loads((FOLDER / "shapes" / "llama-8b.json").read_text())
COSTS = Costs.of(SHAPE)
SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 64, "head_dim": 2}
"""Sizes that no code of the host looks at. How many layers and heads there are stays."""

AT_MOST = 0.05
"""The share aimed at, of rounds that decode."""


def requests_of(model: Any, sizes: list[tuple[int, int]]) -> list[Any]:
    """Requests of so many tokens of a prompt and so many new ones."""
    import torch
    from transformers import GenerationConfig

    from torchax_serve.request_params import RequestParams
    from torchax_serve.scheduler import Request

    generator = torch.Generator().manual_seed(0)
    return [
        Request.of(
            torch.randint(3, VOCAB_SIZE, (prompt_len,), generator=generator).tolist(),
            RequestParams.of_generation_config(GenerationConfig(max_new_tokens=new_tokens), seed=0),
        )
        for prompt_len, new_tokens in sizes
    ]


async def read_all(handles: list[Any]) -> None:
    """As a server reads: a task for each request, in one event loop."""

    async def read(handle: Any) -> None:
        async for _ in handle:
            pass

    await asyncio.gather(*[read(handle) for handle in handles])


def sizes_of(batch: int, context: int, new_tokens: int, *, mixed: bool) -> list[tuple[int, int]]:
    """Prompt and answer of each request: all alike, or of many lengths."""
    if not mixed:
        return [(context, new_tokens)] * batch
    return [(context // 2 + 37 * i % (context // 2), 64 + 29 * i % new_tokens) for i in range(4 * batch)]


def measure(
    options: argparse.Namespace, shape: Path, batch: int, context: int, *, mixed: bool
) -> dict[str, Any] | None:
    """Runs the requests once to compile what they meet, and once more to be recorded; None: no round is of the kind."""
    from torchax_serve import EngineOptions, serve
    from torchax_serve.compilation import gc_pause

    recorder = RoundRecorder(Accelerator(reached=options.reached), COSTS, holds_prompts=mixed, at_once=options.at_once)
    layout: dict[str, int] = {} if options.max_num_steps is None else {"max_num_steps": options.max_num_steps}
    layout |= {
        "max_model_len": context + 64 + options.new_tokens,
        "max_num_seqs": batch,
        "max_num_batched_tokens": batch + 256,
    }
    with (
        recorder.installed(),
        serve(
            shape,
            random_weights=True,
            dtype="bfloat16",
            engine=EngineOptions(**layout, enable_prefix_caching=not mixed),
        ) as model,
    ):
        requests = requests_of(model, sizes_of(batch, context, options.new_tokens, mixed=mixed))
        for _ in range(2):
            gc_pause.freeze_for_serving()
            recorder.clear()
            asyncio.run(read_all(model.engine.submit_all(requests)))
    if options.trace is not None:
        options.trace.write_text(json.dumps({"traceEvents": recorder.events()}))
    rounds = [each for each in recorder.rounds if not each.has_compiled]
    if mixed:
        rounds = [each for each in rounds if each.num_decode and each.num_prefill_tokens]
    else:
        rounds = [each for each in rounds if each.num_decode == batch and each.num_steps > 1]
    if not rounds:
        return None
    return {"kind": "mixed" if mixed else "decode", "batch": batch, "context": context} | summary(rounds)


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Of all rounds together: some have pages to give out or to enter among the prefixes, and take twice as long."""
    num_steps, device_s = sum(each.num_steps for each in rounds), sum(each.device_s for each in rounds)
    num_rounds, names = len(rounds), sorted({name for each in rounds for name in each.parts})
    return {
        "num_rounds": num_rounds,
        "steps_a_round": num_steps / num_rounds,
        "step_us": 1e6 * device_s / num_steps,
        "host_us_a_step": 1e6 * sum(each.host_s for each in rounds) / num_steps,
        "host_us_a_round": 1e6 * sum(each.host_s for each in rounds) / num_rounds,
        "parts_us_a_round": {n: 1e6 * sum(each.parts.get(n, 0.0) for each in rounds) / num_rounds for n in names},
        "share": sum(each.host_s for each in rounds) / device_s,
        "idle": sum(each.idle_s for each in rounds) / device_s,
    }


def fits(batch: int, length: int) -> bool:
    """Whether keys and values of so many requests lie beside the weights on the accelerator."""
    return COSTS.weight_bytes + batch * length * COSTS.token_bytes < 0.9 * Accelerator().memory_bytes


def print_row(row: dict[str, Any]) -> None:
    verdict = "" if row["kind"] == "mixed" else " met" if row["share"] <= AT_MOST else " MISSED"
    print(
        f"{row['kind']:8}{row['batch']:>5}{row['context']:>9}{row['steps_a_round']:>10.1f}{row['step_us']:>9.0f}"
        f"{row['host_us_a_round']:>13.0f}{row['host_us_a_step']:>12.0f}{row['share']:>8.1%}{row['idle']:>8.1%}{verdict}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--kind", nargs="+", choices=["decode", "mixed"], default=["decode", "mixed"])
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--reached", type=float, default=1.0, help="part of the device's rates that programs reach")
    parser.add_argument(
        "--at-once", action="store_true", help="the device takes no time, though shares are of its time"
    )
    parser.add_argument("--max-num-steps", type=int, help="default: the engine's own")
    parser.add_argument("--trace", type=Path, help="also write the last case's spans here, as JSON")
    parser.add_argument("--output", type=Path, help="also write the numbers here, as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="host-time") as scratch:
        cache = Path(scratch) / "cache"
        keep_kernels(cache)
        os.environ["XDG_CACHE_HOME"] = str(cache)  # programs of this run are nobody else's
        from torchax_serve.bench.machine import Machine

        shape = Path(scratch) / "shape.json"
        special = {"bos_token_id": None, "eos_token_id": None}
        shape.write_text(json.dumps(SHAPE | SMALL | special))
        rows = []
        print(
            f"{'':8}{'batch':>5}{'context':>9}{'steps':>10}{'step us':>9}{'host us':>13}{'a step':>12}"
            f"{'share':>8}{'idle':>8}"
        )
        for kind in options.kind:
            for context in options.context if kind == "decode" else options.context[:1]:
                for batch in options.batch:
                    if not fits(batch, context + options.new_tokens):
                        print(f"{kind:8}{batch:>5}{context:>9}  does not fit in {Accelerator().name}")
                        continue
                    row = measure(options, shape, batch, context, mixed=kind == "mixed")
                    if row is None:
                        print(f"{kind:8}{batch:>5}{context:>9}  no such round")
                        continue
                    rows.append(row)
                    print_row(row)
        if options.output is not None:
            command = shlex.join(["python", *sys.argv])
            report = {
                "command": command,
                "machine": str(Machine.here()),
                "stood in for": str(Accelerator(reached=options.reached)),
            }
            options.output.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
