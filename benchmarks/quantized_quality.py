"""What quantization costs of real models: ``verify --quantization``, embeddings, and llama.cpp's perplexity.

    python benchmarks/quantized_quality.py                        # fetches the models (tests/real/fetch.py)
    python benchmarks/quantized_quality.py --llama-cpp FOLDER     # as well as llama.cpp, which peers.py has installed
    python benchmarks/quantized_quality.py --llama-cpp FOLDER --tokens FILE.gguf ...    # greedy tokens of both, no more

Results go to benchmarks/results/quantized-quality.json, the tables to standard output.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "quantized-quality.json"
TEXT = HERE.parent / "torchax_serve" / "parity" / "quality_text.txt"
PRESETS = ("int8", "int4", "nf4", "fp8", "w8a8")
THREADS = len(os.sched_getaffinity(0))
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "real")]


def verify(model, **options):
    """What ``torchax-serve verify MODEL --quantization PRESET --json`` prints."""
    from torchax_serve.parity.quantization import measure_quality

    return measure_quality(model, **options).as_dict()


def language_models(folders):
    """A row for each model and preset."""
    rows = []
    for title, folder in folders.items():
        for preset in PRESETS:
            found = verify(folder, quantization=preset)
            rows.append({"title": title, "preset": preset, **found})
            print(line_of(rows[-1]), flush=True)
    return rows


def line_of(row):
    change = row["perplexity"] / row["dense_perplexity"] - 1
    return (
        f"| {row['title']} | {row['preset']} | {row['perplexity']:.2f} ({change:+.1%}) | {row['mean_kl']:.4f} | "
        f"{row['kl_99']:.3f} | {row['same_top']:.1%} | {row['dense_bytes'] / 1e6:.0f} to {row['num_bytes'] / 1e6:.0f} |"
    )


def embeddings(folder):
    """The cosine between embeddings of sentences with and without quantization, by preset."""
    import numpy as np

    from torchax_serve import serve

    sentences = [each.strip() for each in TEXT.read_text().replace("\n", " ").split(".") if each.strip()]
    rows, dense = [], None
    for preset in (None, *PRESETS):
        with serve(folder, quantization=preset) as model:
            found = np.asarray(model.embed(sentences, normalize=True), np.float64)
            num_bytes = model.load_report.weights_bytes
        dense = found if dense is None else dense
        cosines = (found * dense).sum(1)
        rows.append({"preset": preset, "mean": cosines.mean(), "least": cosines.min(), "num_bytes": num_bytes})
        print(f"| MiniLM | {preset or 'dense'} | {cosines.mean():.5f} | {cosines.min():.5f} | {num_bytes / 1e6:.0f} |")
    return rows


class LlamaCpp:
    """llama.cpp's logits by its C interface."""

    def __init__(self, environment, file, context_len):
        libraries = Path(environment) / "lib"
        self._shim = ctypes.CDLL(str(libraries / "libllama_shim.so"))
        self._llama = ctypes.CDLL(str(libraries / "libllama.so"))
        self._shim.engine_open.restype = ctypes.c_void_p
        self._llama.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
        pointer = self._shim.engine_open(str(file).encode(), THREADS, context_len, 1, context_len)
        if not pointer:
            raise RuntimeError(f"llama.cpp could not load {file}")
        self._engine = ctypes.c_void_p(pointer)
        # The shim's struct begins with the model and the context.
        self._context = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[1]

    def logits(self, ids, vocab_size):
        """float32[len, vocab] of a sequence of its own."""
        import numpy as np

        self._shim.engine_forget(self._engine, 0)
        count = len(ids)
        integers, flags = ctypes.c_int32 * count, ctypes.c_int8 * count
        code = self._shim.engine_step(
            self._engine, count, integers(*ids), integers(*range(count)), integers(), flags(*[1] * count), integers()
        )
        if code:
            raise RuntimeError(f"llama.cpp failed with {code}")
        rows = [self._llama.llama_get_logits_ith(ctypes.c_void_p(self._context), i) for i in range(count)]
        return np.stack([np.ctypeslib.as_array(row, (vocab_size,)) for row in rows])


def perplexity_of_llama_cpp(environment, file):
    """Perplexity of the text, in the windows of ``verify``."""
    import numpy as np
    import torch

    from model_adapters.loading import load_model
    from torchax_serve.parity.quantization import WINDOW

    loaded = load_model(file)
    ids = torch.tensor(loaded.tokenizer()(TEXT.read_text())["input_ids"])
    engine, losses = LlamaCpp(environment, file, WINDOW), []
    for window in ids.split(WINDOW):
        logits = engine.logits(window.tolist(), loaded.config.vocab_size)[:-1]
        logs = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), -1)
        losses += (-logs.gather(1, window[1:, None])[:, 0]).tolist()
    return math.exp(sum(losses) / len(losses)), len(losses)


def greedy_tokens(environment, file, num_prompts=12, num_tokens=16):
    """Of the engine's greedy tokens, how many are llama.cpp's own, and by what log-probability others are behind."""
    import numpy as np
    import texts

    from torchax_serve import EngineOptions, SamplingParams, serve

    params = SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)
    with serve(file, engine=EngineOptions(max_num_seqs=4)) as model:
        prompts = texts.prompts(model.tokenizer)[:num_prompts]
        answers = [list(each.token_ids) for each in model.generate_batch(prompts, params)]
        vocab_size = model.config.vocab_size
    engine, gaps = LlamaCpp(environment, file, max(map(len, prompts)) + num_tokens), []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = engine.logits([*prompt, *answer], vocab_size)[len(prompt) - 1 : -1]
        gaps.append(logits.max(-1) - logits[np.arange(len(answer)), answer])
    behind = sorted(float(gap) for each in gaps for gap in each if gap > 0)
    total = sum(map(len, gaps))
    same = sum(not each.any() for each in gaps)
    print(
        f"{Path(file).name}: {total - len(behind)} of {total} tokens, {same} of {len(gaps)} answers are llama.cpp's",
        end="",
    )
    print(f"; others are behind by {behind[0]:.3f} to {behind[-1]:.3f}" if behind else "", flush=True)


def gguf_files(environment):
    from fetch import gguf_of

    rows = []
    for name in ("smollm2", "gemma3"):
        file = gguf_of(name)
        ours = verify(file, text=TEXT)
        theirs, count = perplexity_of_llama_cpp(environment, file) if environment else (None, ours["num_tokens"])
        rows.append({"file": name, "perplexity": ours["perplexity"], "llama_cpp": theirs, "num_tokens": count} | ours)
        beside = "" if theirs is None else f", llama.cpp {theirs:.4f} ({ours['perplexity'] / theirs - 1:+.2%})"
        print(f"{name}: {ours['perplexity']:.4f}{beside}; dense weights: KL {ours['mean_kl']:.2e}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama-cpp", type=Path, help="environment of llama.cpp")
    parser.add_argument("--tokens", nargs="+", metavar="FILE", help="compare greedy tokens of GGUF files, and end")
    arguments = parser.parse_args()
    if arguments.tokens:
        if arguments.llama_cpp is None:
            parser.error("--tokens: expected --llama-cpp FOLDER with it, got none")
        for file in arguments.tokens:
            greedy_tokens(arguments.llama_cpp, Path(file))
        return
    from fetch import folder_of

    content = {}
    print("| model | preset | perplexity | mean KL | 99 % KL | same top token | MB |\n|" + "---|" * 7)
    content["models"] = language_models({"SmolLM2-135M": str(folder_of("smollm2")), "embedded": None})
    print("| model | preset | mean cosine | least | MB |\n|" + "---|" * 5)
    content["embeddings"] = embeddings(str(folder_of("minilm")))
    content["files"] = gguf_files(arguments.llama_cpp)
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
