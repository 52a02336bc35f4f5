"""What masks of a grammar cost at large vocabularies, at 32 rows that write JSON.

    python benchmarks/masks.py --vocabulary o200k_base.tiktoken --output benchmarks/results/masks-128k-262k.json

The tokens are those of a tiktoken file, in its order, and further words beyond its end. On the host: processor seconds
of `GrammarMasks.fill` for 32 answers that follow a JSON schema, each token drawn from those allowed. The engine
computes them while the device computes the logits. On the device: the end of a step, which is the product with the
table of the vocabulary (hidden size 1024, float32) and the choice of tokens, with masks as an argument and without, in
turns. Its seconds are those of the processor over the number of cores, which other programs do not change. A step is
longer by all layers of a model, so that shares of the end of a step are upper bounds.

    python benchmarks/masks.py --vocabulary o200k_base.tiktoken --engine

measures complete steps of the engine in place of their end: 32 requests to a Llama of random weights with these
vocabularies (hidden size 512, 4 layers), with a grammar and without, in turns; processor seconds of the process for 32
tokens, and those of them that `GrammarMasks.fill` takes. A real model of such a vocabulary has more layers.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchax_serve.bench.machine import Machine
from torchax_serve.profiling.bandwidth import num_cores
from torchax_serve.sampling.grammar import GrammarCompiler, json_grammar
from torchax_serve.sampling.token_masks import ALL_TOKENS, mask_logits, num_words

NUM_ROWS, HIDDEN_SIZE = 32, 1024
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "tags": {"enum": ["a", "b", "other"]}},
        "required": ["name", "count", "tags"],
    },
}

LONG = {**SCHEMA, "minItems": 64}
"""Of answers that do not end within a measurement."""
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


def tokenizer_of(file: Path, size: int) -> Any:
    """A tokenizer with so many tokens, the last of which ends answers; masks do not need its merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's characters for bytes
    others = [byte for byte in range(256) if byte not in shown]
    chars = {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    vocab: dict[str, int] = {}
    for line in file.read_bytes().splitlines()[: size - 1]:
        vocab["".join(chars[byte] for byte in base64.b64decode(line.split()[0]))] = len(vocab)
    words = list(vocab)[-100_000:]
    for first in range(len(words)):
        if len(vocab) >= size - 1:
            break
        vocab.setdefault(words[first] + words[-first - 1], len(vocab))
    vocab["<eos>"] = size - 1
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def fill_seconds(make: Any, size: int, num_steps: int) -> list[float]:
    """Processor seconds of each mask of the answers."""
    rng, seconds = np.random.default_rng(0), []
    rows: list[tuple[Any, list[int]]] = [(make(), []) for _ in range(NUM_ROWS)]
    for _ in range(num_steps):
        for number, (masks, token_ids) in enumerate(rows):
            bitmask = np.full(num_words(size), ALL_TOKENS)
            began = time.thread_time()
            masks.fill(bitmask, token_ids)
            seconds.append(time.thread_time() - began)
            allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: size - 1])
            if allowed.size:
                token_ids.append(int(rng.choice(allowed)))
            else:  # the answer is complete
                rows[number] = (make(), [])
    return seconds


def device_seconds(size: int, num_turns: int) -> tuple[float, float]:
    """Median seconds of the end of a step, without masks and with them."""

    def end_of_step(table: jax.Array, hidden: jax.Array, bitmask: jax.Array | None) -> jax.Array:
        return mask_logits(hidden @ table.T, bitmask, lambda logits: logits.argmax(-1))

    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((size, HIDDEN_SIZE), np.float32))
    hidden = jnp.asarray(rng.standard_normal((NUM_ROWS, HIDDEN_SIZE), np.float32))
    masks = rng.integers(-(2**31), 2**31, (NUM_ROWS, num_words(size)), np.int32)
    step, found = jax.jit(end_of_step), {False: [], True: []}
    for turn in range(num_turns + 1):
        for masked in (False, True):
            began = time.process_time()
            step(table, hidden, masks if masked else None).block_until_ready()  # masks come from the host
            if turn:
                found[masked].append((time.process_time() - began) / num_cores())
    return statistics.median(found[False]), statistics.median(found[True])


def measure(options: argparse.Namespace, size: int) -> dict[str, Any]:
    """Times of one vocabulary."""
    compiler = GrammarCompiler(tokenizer_of(options.vocabulary, size), size, [size - 1])
    began = time.perf_counter()
    make = compiler.masks(json_grammar(SCHEMA))
    compile_s = time.perf_counter() - began
    fills = fill_seconds(make, size, options.steps)
    plain, masked = device_seconds(size, options.turns)
    host_s = NUM_ROWS * statistics.fmean(fills)
    quantiles = {f"p{100 * part:g}": 1e6 * float(np.quantile(fills, part)) for part in (0.5, 0.9, 0.99)}
    return {
        "vocab_size": size,
        "num_rows": NUM_ROWS,
        "compile_s": compile_s,
        "fill_us_a_row": quantiles | {"mean": 1e6 * statistics.fmean(fills)},
        "fill_ms_a_step": 1e3 * host_s,
        "end_of_step_ms": 1e3 * plain,
        "masked_end_of_step_ms": 1e3 * masked,
        "host_share": host_s / plain,
        "device_share": masked / plain - 1,
    }


class TimedMasks:
    """Masks of a grammar, and the processor seconds that they take.

    Args:
        masks: Of `GrammarCompiler`.
        seconds: Gets the seconds of each call.
    """

    def __init__(self, masks: Any, seconds: list[float]) -> None:
        self._masks, self._seconds = masks, seconds

    def fill(self, bitmask: np.ndarray, token_ids: Any) -> Any:
        """Computes the mask of the next token."""
        began = time.thread_time()
        try:
            return self._masks.fill(bitmask, token_ids)
        finally:
            self._seconds.append(time.thread_time() - began)


def measure_engine(options: argparse.Namespace, size: int) -> dict[str, Any]:
    """Times of the engine's steps with one vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from torchax_serve import EngineOptions, SamplingParams, serve

    config = LlamaConfig(vocab_size=size, tie_word_embeddings=True, **SHAPE, eos_token_id=size - 1, bos_token_id=None)
    make = GrammarCompiler(tokenizer_of(options.vocabulary, size), size, [size - 1]).masks(json_grammar(LONG))
    engine = EngineOptions(max_num_seqs=NUM_ROWS, max_model_len=512)
    found: dict[bool, list[float]] = {False: [], True: []}
    fills: list[float] = []
    num_tokens = NUM_ROWS * options.steps
    params = SamplingParams(max_new_tokens=options.steps, temperature=0, ignore_eos=True)
    held = dataclasses.replace(params, ignore_eos=False)
    with serve(LlamaForCausalLM(config), engine=engine) as model:
        for turn in range(options.turns + 1):
            for masked in (False, True):
                fills_before, began = len(fills), time.process_time()
                streams = [
                    model.iter_tokens(
                        [row + 1, 5, 9],
                        model.generation_config,
                        params=held if masked else params,
                        masks=TimedMasks(make(), fills) if masked else None,
                    )
                    for row in range(NUM_ROWS)
                ]
                if sum(len(list(stream)) for stream in streams) != num_tokens:
                    raise SystemExit("an answer has ended early, and shares would be wrong")
                if turn:  # the first one compiles
                    found[masked].append(1e3 * (time.process_time() - began) * NUM_ROWS / num_tokens)
                else:
                    del fills[fills_before:]
    plain, with_masks = statistics.median(found[False]), statistics.median(found[True])
    host_ms = 1e3 * NUM_ROWS * statistics.fmean(fills)
    return {
        "vocab_size": size,
        "num_rows": NUM_ROWS,
        "shape": SHAPE,
        "step_processor_ms": plain,
        "masked_step_processor_ms": with_masks,
        "fill_processor_ms_a_step": host_ms,
        "share_of_fill": host_ms / plain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=Path, required=True, help="a tiktoken file")
    parser.add_argument("--size", type=int, nargs="+", default=[128_256, 262_144])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--engine", action="store_true", help="measure complete steps of the engine")
    parser.add_argument("--output", type=Path, help="also write the numbers here, as JSON")
    options = parser.parse_args()
    rows = []
    for size in options.size:
        rows.append((measure_engine if options.engine else measure)(options, size))
        print(rows[-1], flush=True)
    if options.output is not None:
        names = [Path(each).name if each == str(options.vocabulary) else each for each in sys.argv]
        report = {"command": shlex.join(["python", *names]), "machine": dataclasses.asdict(Machine.here())}
        options.output.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
