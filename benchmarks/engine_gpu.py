"""The engine on a GPU beside transformers' generate in eager PyTorch on the same GPU: decode rates and first tokens.

    python benchmarks/engine_gpu.py benchmarks/shapes/llama-8b.json --batch 1 8 64 --prompt 512 --out results.json
    python benchmarks/engine_gpu.py benchmarks/shapes/llama-8b.json --quantization none int8 int4 fp8

Random weights in bfloat16 on both sides, prompts of random tokens, greedy decoding that never ends early. The rate of
decoding is that of the tokens after the first, over the time that they take beyond a run of one token. Beside it
stands the part of the device's copy bandwidth at which weights, keys and values are read. Each quantization is an
engine of its own, beside the same eager model in bfloat16.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the device

import jax
import numpy as np
import torch
import transformers

from serving_peers.roofline import kv_token_bytes, num_weights
from torchax_serve import EngineOptions, SamplingParams, serve


def rates(run, args, shape, weights_bytes, bandwidth):
    """Measures each batch: median seconds of one token and of all, and what follows from them."""
    rows = []
    for batch in args.batch:
        for new in (1, args.new):
            run(batch, new)  # compiles
        times = {new: [] for new in (1, args.new)}
        for _ in range(args.repeats):
            for new, found in times.items():
                begin = time.perf_counter()
                run(batch, new)
                found.append(time.perf_counter() - begin)
        first, whole = (statistics.median(times[new]) for new in (1, args.new))
        step_s = (whole - first) / (args.new - 1)
        read = weights_bytes + batch * (args.prompt + args.new / 2) * kv_token_bytes(shape)
        rows.append(
            {
                "batch": batch,
                "first_token_s": first,
                "prefill_tokens_per_s": batch * args.prompt / first,
                "decode_tokens_per_s": batch / step_s,
                "step_s": step_s,
                "of_copy_bandwidth": read / step_s / bandwidth,
            }
        )
    return rows


def copy_bandwidth():
    """Returns bytes per second of a copy on the device, read and written."""
    source = torch.randn(1 << 30, device="cuda")
    target, found = torch.empty_like(source), []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return 2 * source.nbytes / statistics.median(found)


def prompts(args, batch, vocab_size):
    return np.random.default_rng(batch).integers(5, vocab_size, (batch, args.prompt))


def eager(args, shape, bandwidth):
    """Measures transformers' generate with its default settings."""
    config = transformers.AutoConfig.for_model(**shape)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def run(batch, new):
        ids = torch.tensor(prompts(args, batch, config.vocab_size), device=args.device)
        with torch.no_grad():
            model.generate(ids, do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0).cpu()

    return {"rows": rates(run, args, shape, 2 * sum(num_weights(shape)), bandwidth)}


def ours(args, shape, bandwidth, quantization):
    """Measures the engine; beside the rates, the seconds until it was ready and the bytes of what a step reads."""
    limits = EngineOptions(
        max_num_seqs=max(args.batch),
        max_model_len=args.prompt + args.new,
        enable_prefix_caching=False,
        page_size=args.page,
        max_num_batched_tokens=args.batched,
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoConfig.for_model(**shape, dtype="bfloat16").save_pretrained(folder)
        begin = time.perf_counter()
        with serve(folder, random_weights=True, dtype="bfloat16", engine=limits, quantization=quantization) as model:
            engine = model.engine
            if args.warm_up:
                engine.warm_up()
            load_s = time.perf_counter() - begin
            print(f"ready in {load_s:.0f} s; {engine!r}", flush=True)

            def run(batch, new):
                params = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
                engine_prompts = prompts(args, batch, shape["vocab_size"]).tolist()
                assert all(len(each.token_ids) == new for each in model.generate_batch(engine_prompts, params))

            # Of the embedding table, which nothing quantizes, a step reads some rows.
            read = model.load_report.weights_bytes - 2 * shape["vocab_size"] * shape["hidden_size"]
            return {"ready_s": load_s, "read_bytes": read, "rows": rates(run, args, shape, read, bandwidth)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--batched", type=int, default=2048, help="tokens computed in one step")
    parser.add_argument("--quantization", nargs="+", default=["none"], help="presets")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True, help="compile all programs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = json.loads(args.shape.read_text())
    on_gpu = args.device == "cuda"
    bandwidth = copy_bandwidth() if on_gpu else 1.0
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else args.device,
        "copy_bytes_per_s": bandwidth,
        "jax": jax.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": args.shape.name,
        "options": {k: str(v) for k, v in vars(args).items() if k != "out"},
    }
    sides = {"transformers eager": eager} if args.eager else {}
    for preset in args.quantization:
        sides[f"ours, {preset}"] = functools.partial(ours, quantization=None if preset == "none" else preset)
    for name, measure in sides.items():
        report[name] = measure(args, shape, bandwidth)
        for row in report[name]["rows"]:
            print(
                f"{name:20} batch {row['batch']:3}: first token {row['first_token_s'] * 1e3:7.1f} ms, "
                f"{row['decode_tokens_per_s']:7.0f} tokens/s, {row['of_copy_bandwidth']:4.0%} of the bandwidth",
                flush=True,
            )
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
