"""Decoding of several shapes in turns, beside the bytes that their steps read: hybrids beside a dense decoder.

    python benchmarks/shapes_decode.py qwen3-110m granite-4-h-110m qwen3.5-104m
    python benchmarks/shapes_decode.py qwen3-110m granite-4-h-110m --requests 1 8 --turns 5 --save FILE.json

A shape is a file of benchmarks/shapes, with random weights in bfloat16, served with default options. Each is asked for
so many requests at once, of 128 prompt and 64 new tokens; the shapes take turns, and one call before them compiles.
Decoding is the time behind a call for one token. A step reads the weights but for the table that tokens are looked up
in, reads and writes the states of recurrent layers, and reads the keys and values of its requests. The last column is
the rate of bytes over that of the first shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from serving_peers.conversion import write_tokenizer
from serving_peers.roofline import kv_token_bytes
from torchax_serve import SamplingParams, serve
from torchax_serve.bench.machine import Machine

SHAPES = Path(__file__).resolve().parent / "shapes"
PROMPT_LEN, NEW_TOKENS = 128, 64


class Served:
    """A served shape, and what its calls have taken.

    Attributes:
        name: of the shape.
        seconds: of decoding, by the number of requests.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.seconds = name, dict[int, list[float]]()
        self.shape = json.loads((SHAPES / f"{name}.json").read_text())
        (folder / "config.json").write_text(json.dumps(self.shape))
        write_tokenizer(folder, self.shape["vocab_size"])
        self.model = serve(folder, random_weights=True, dtype="bfloat16")

    def call(self, num_requests: int, new_tokens: int, seed: int) -> float:
        """Seconds of so many requests of random tokens, which no earlier call had."""
        keys = jax.random.randint(jax.random.key(seed), (num_requests, PROMPT_LEN), 3, self.shape["vocab_size"])
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        prompts, began = keys.tolist(), time.perf_counter()
        self.model.generate_batch(prompts, params)
        return time.perf_counter() - began

    def turn(self, num_requests: int, seed: int) -> None:
        first = self.call(num_requests, 1, 2 * seed)
        self.seconds.setdefault(num_requests, []).append(self.call(num_requests, NEW_TOKENS, 2 * seed + 1) - first)

    def step_bytes(self, num_requests: int) -> int:
        """Bytes that a step in the middle of the answers reads and writes."""
        weights = {id(each): each for each in self.model._loaded.weights.values()}.values()
        table = (
            0 if self.shape["tie_word_embeddings"] else self.model._loaded.weights["model.embed_tokens.weight"].nbytes
        )
        recurrent = getattr(self.model.engine._runner._cache, "recurrent", None)
        states = 0 if recurrent is None else 2 * recurrent.num_bytes(1)
        cached = (PROMPT_LEN + NEW_TOKENS // 2) * kv_token_bytes(self.shape)
        return sum(each.nbytes for each in weights) - table + num_requests * (states + cached)

    def row(self, num_requests: int) -> dict[str, Any]:
        rate = num_requests * (NEW_TOKENS - 1) / statistics.median(self.seconds[num_requests])
        num_bytes = self.step_bytes(num_requests)
        gb_per_s = rate / num_requests * num_bytes / 1e9
        return {
            "shape": self.name,
            "requests": num_requests,
            "decode_tokens_per_s": round(rate, 1),
            "step_megabytes": round(num_bytes / 1e6, 1),
            "gb_per_s": round(gb_per_s, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="SHAPE")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    if unknown := [name for name in options.shapes if not (SHAPES / f"{name}.json").exists()]:
        parser.error(f"SHAPE: expected names of files in {SHAPES.name}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in options.shapes]
        for folder in folders:
            folder.mkdir()
        served = [Served(name, folder) for name, folder in zip(options.shapes, folders, strict=True)]
        for number in options.requests:
            for turn in range(options.turns + 1):
                for each in served:
                    each.turn(number, turn)
            for each in served:
                each.seconds[number].pop(0)  # of the turn that compiles
        rows = [each.row(number) for number in options.requests for each in served]
        for each in served:
            each.model.close()
    for row in rows:
        first = next(each for each in rows if each["requests"] == row["requests"])
        row["over_first"] = round(row["gb_per_s"] / first["gb_per_s"], 2)
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.save:
        command = " ".join(["python benchmarks/shapes_decode.py", *sys.argv[1:]])
        about = {"command": command, "machine": Machine.here().__dict__}
        options.save.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
