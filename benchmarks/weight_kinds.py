"""Prefill and decode of each kind of weights over plain products of the same size, on one core, by processor time.

    python benchmarks/weight_kinds.py              # measures, and keeps the numbers of this processor
    python benchmarks/weight_kinds.py --guard      # compares: 1 if a number is above 1.4 times the kept one
    python benchmarks/weight_kinds.py --kinds int8 int4

The engine serves two layers of the 184-million-parameter shape with random weights of each kind. Prefill is a call of
eight prompts of 64 tokens for one token each; decoding is what a call for 33 tokens takes longer. Beside them, in the
same process and in turns, are products of NumPy in float32: for prefill one that multiplies, for decoding one that
reads a matrix of the memory. A number is the processor time of the engine over what such products take for as many
multiplications, or for as many bytes of weights. The best of a kind's turns counts on both sides, since other programs
on the machine can only lengthen a turn. The process has one core, so that no thread waits for another. Processors
differ in what they multiply: numbers are kept for each, and a guard on one that has none says so. What is above the
limit is measured up to four times more, and its best number counts: a change that made it slower is above it each time.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from processors import processor

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "weight-kinds.json"
SHAPE = FOLDER / "shapes" / "qwen3-184m.json"
LIMIT = 1.4
"""Times a kept number, above which the guard fails."""
NUM_LAYERS, VOCAB = 2, 4096
NUM_PROMPTS, PROMPT_LEN, NEW_TOKENS = 8, 64, 33
TURNS, MOST_TRIES = 3, 4
MEASURED_AGAIN = 4
"""Times that the guard measures what is above the limit once more."""
_OF_FILES = {"tile_size": 32, "scale_dtype": "float16"}
KINDS: dict[str, tuple[str, Any, float]] = {
    "float32": ("float32", None, 32),
    "bfloat16": ("bfloat16", None, 16),
    "int8": ("bfloat16", "int8", 8.5),
    "int4": ("bfloat16", "int4", 4.5),
    "as GGUF's Q8_0": ("bfloat16", [{"weight_qtype": "int8", **_OF_FILES}], 8.5),
    "as GGUF's Q4_K": (
        "bfloat16",
        [{"weight_qtype": "int4", "weight_calibration_method": "minmax", **_OF_FILES}],
        5,
    ),
    "as MXFP4, a table of 16 numbers": ("bfloat16", "nf4", 4.5),
}
"""Dtype, quantization and bits of a weight by kind.

Activations meet the numbers of files as they are, and are rounded to int8 by presets.
"""
Numbers = dict[str, dict[str, float]]


def slower(found: Numbers, kept: Mapping[str, Mapping[str, float]], limit: float = LIMIT) -> dict[str, list[str]]:
    """Lines on what takes more than `limit` times the kept number, by kind."""
    wrong: dict[str, list[str]] = {}
    for kind, numbers in found.items():
        for name, value in numbers.items():
            was = kept.get(kind, {}).get(name)
            if was is not None and value > limit * was:
                line = f"{kind}, {name}: expected at most {limit:g} of {was:g} times a plain product, got {value:g}"
                wrong.setdefault(kind, []).append(line)
    return wrong


def best_of(found: Numbers, again: Numbers) -> Numbers:
    """The lower of each two numbers."""
    return {
        kind: {name: min(value, again.get(kind, {}).get(name, value)) for name, value in numbers.items()}
        for kind, numbers in found.items()
    }


def cpu_s(function: Callable[[], Any]) -> float:
    """Processor seconds of a call, of all threads."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


class PlainProducts:
    """Products of NumPy in float32."""

    def __init__(self) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        self._rows = rng.standard_normal((256, 1024), np.float32)
        self._weight = rng.standard_normal((1024, 3072), np.float32)
        self._matrix = rng.standard_normal((8192, 2048), np.float32)  # 64 MiB: more than a core's own caches
        self._vector = rng.standard_normal(2048, np.float32)
        self.reset()

    def reset(self) -> None:
        """Begins anew with the best of turns."""
        self.product_s = self.byte_s = float("inf")

    def turn(self) -> None:
        """Times both once."""
        self.product_s = min(self.product_s, cpu_s(lambda: self._rows @ self._weight) / (256 * self._weight.size))
        self.byte_s = min(self.byte_s, cpu_s(lambda: self._matrix @ self._vector) / self._matrix.nbytes)


class KindOfWeights:
    """The engine with weights of one kind."""

    def __init__(self, name: str) -> None:
        import numpy as np
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from torchax_serve import serve
        from torchax_serve.engine.options import EngineOptions

        dtype, quantization, bits = KINDS[name]
        shape = json.loads(SHAPE.read_text())
        config = Qwen3Config(**shape | {"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCAB})
        torch.manual_seed(0)
        module = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
        linears = [each for each in module.model.modules() if isinstance(each, torch.nn.Linear)]
        in_layers, in_head = sum(each.weight.numel() for each in linears), VOCAB * config.hidden_size
        self._num_products = NUM_PROMPTS * (PROMPT_LEN * in_layers + in_head)
        self._num_bytes = (in_layers + in_head) * bits / 8
        options = EngineOptions(max_num_seqs=NUM_PROMPTS, max_model_len=256, kv_cache_memory_bytes=1 << 26)
        self._model, self._rng = serve(module, engine=options, quantization=quantization), np.random.default_rng(0)
        self.first_s = self.all_s = float("inf")

    def _run(self, new_tokens: int) -> float:
        """Processor seconds of a call in which nothing compiles."""
        from torchax_serve import SamplingParams
        from torchax_serve.bench.timed_model import count_programs

        params = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        for _ in range(MOST_TRIES):
            prompts = self._rng.integers(2, VOCAB, (NUM_PROMPTS, PROMPT_LEN)).tolist()  # new ones, in no cache
            with count_programs() as programs:
                seconds = cpu_s(lambda prompts=prompts: self._model.generate_batch(prompts, params))
                self._wait()
            if not programs[0]:
                break
        return seconds

    def _wait(self) -> None:
        executables = self._model.torch_model._jax_runtime.steps.executables
        if executables.background is not None:
            executables.background.wait()
        executables.wait_for_writes()

    def turn(self) -> None:
        """Times each call once."""
        self.first_s = min(self.first_s, self._run(1))
        self.all_s = min(self.all_s, self._run(NEW_TOKENS))

    def numbers(self, plain: PlainProducts) -> dict[str, float]:
        """Times over those of plain products."""
        decode_s = (self.all_s - self.first_s) / (NEW_TOKENS - 1)
        return {
            "prefill": round(self.first_s / (self._num_products * plain.product_s), 3),
            "decode": round(decode_s / (self._num_bytes * plain.byte_s), 3),
        }

    def close(self) -> None:
        self._model.close()


def measured(kinds: Sequence[str], plain: PlainProducts) -> Numbers:
    """The numbers of some kinds, one after the other; a line for each."""
    found = {}
    for name in kinds:
        kind = KindOfWeights(name)
        plain.reset()
        for _ in range(TURNS):
            plain.turn()
            kind.turn()
            plain.turn()
        found[name] = kind.numbers(plain)
        kind.close()
        print(f"{name:32} {found[name]}, {time.process_time():.0f} s of the processor so far", flush=True)
    return found


def keep(path: Path, key: str, found: Numbers) -> None:
    """Writes the numbers of this processor, beside those of others."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "torch", "transformers", "numpy")}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    numbers = {**kept.get(key, {}).get("numbers", {}), **found}
    kept[key] = {"command": "python benchmarks/weight_kinds.py", "date": date, "versions": versions, "numbers": numbers}
    path.write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guard", action="store_true", help="compare with the kept numbers")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX and NumPy make their threads
    from parity_sweep.sweep import QUICK_COMPILATION

    # Programs are compiled by the quickest settings, which takes half of the time: products are the kernels' anyway.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
    key, plain = processor(), PlainProducts()
    found = measured(options.kinds, plain)
    if not options.guard:
        keep(options.results, key, found)
        return
    kept = json.loads(options.results.read_text()).get(key, {}).get("numbers")
    if kept is None:
        print(f"no numbers are kept for the processor {key}: nothing is compared; measure without --guard")
        return
    wrong = slower(found, kept)
    for _ in range(MEASURED_AGAIN):
        if not wrong:
            break
        found |= best_of({kind: found[kind] for kind in wrong}, measured(list(wrong), plain))
        wrong = slower(found, kept)
    print("\n".join(line for lines in wrong.values() for line in lines) or f"nothing is above {LIMIT:g} of its number")
    sys.exit(int(bool(wrong)))


if __name__ == "__main__":
    main()
