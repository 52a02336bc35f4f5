"""Decode attention on a CPU: our implementations against torch's SDPA and the memory bandwidth, all in one run.

    python benchmarks/attention_cpu.py --batch 1 8 32 --context 256 2048

Each number is the median time of one layer over interleaved repetitions of a program of several layers with separate
caches. Torch has no paged cache on CPU: it gets dense keys and values of the same lengths and writes nothing. Threads
spin after a parallel region and disturb what runs next, so that every timing starts after a pause.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.ops import AttentionArgs, decode_attention, use

PAUSE_S = 0.02  # until threads of the last parallel region sleep


def timed(function):
    time.sleep(PAUSE_S)
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def read_bandwidth():
    """Bytes per second of a plain multi-threaded read, the best of five."""
    numbers = torch.ones(64 << 20)
    return numbers.nbytes / min(timed(numbers.sum) for _ in range(5))


def ours(implementation, q, k, v, pools, page_table, lens):
    """Runs all layers in one donated program."""
    starts = jnp.zeros_like(lens)

    @jax.jit
    def prepare(pools):
        return [pool + 0 for pool in pools]

    def layers(q, pools):
        new = []
        for pool in pools:
            out, pool = decode_attention(q, k, v, pool, page_table, lens, starts, AttentionArgs(q.shape[2] ** -0.5))
            q, _ = q + out, new.append(pool)
        return q, new

    with use("decode_attention", implementation):
        program = jax.jit(layers, donate_argnums=1).lower(q, pools).compile()
    state = [prepare(pools)]

    def step():
        out, state[0] = program(q, state[0])
        jax.block_until_ready(out)

    return step


def torchs(q, keys, values):
    def step():
        for k, v in zip(keys, values, strict=True):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return step


def candidates(args, batch, context, dtype):
    rng = np.random.default_rng(0)
    group = args.heads // args.kv_heads

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtype)

    q = normal(batch, args.heads, args.dim)
    k, v = (normal(batch, args.kv_heads, args.dim) for _ in range(2))
    lens = jnp.full((batch,), context, jnp.int32)
    pages = -(-context // args.page)
    table = jnp.asarray(rng.permutation(batch * pages).reshape(batch, pages), jnp.int32)
    paged = [normal(batch * pages, args.kv_heads, args.page, 2 * args.dim) for _ in range(args.layers)]
    rows = [normal(batch, args.kv_heads, context, 2 * args.dim) for _ in range(args.layers)]
    dense = jnp.arange(batch, dtype=jnp.int32)[:, None]
    td = getattr(torch, dtype)
    return {
        "cpu-ffi, paged": ours("cpu-ffi", q, k, v, paged, table, lens),
        "cpu-ffi, contiguous": ours("cpu-ffi", q, k, v, rows, dense, lens),
        "reference (XLA)": ours("reference", q, k, v, paged, table, lens),
        f"torch SDPA, group {group}": torchs(
            torch.randn(batch, args.heads, 1, args.dim).to(td),
            [torch.randn(batch, args.kv_heads, context, args.dim).to(td) for _ in range(args.layers)],
            [torch.randn(batch, args.kv_heads, context, args.dim).to(td) for _ in range(args.layers)],
        ),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[256, 2048])
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float16", "float32"]
    )
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    peak = read_bandwidth()
    if not args.json:
        versions = f"{torch.get_num_threads()} threads; torch {torch.__version__}, jax {jax.__version__}"
        print(f"read bandwidth {peak / 1e9:.1f} GB/s, {versions}")
        print(f"{args.heads} query heads, {args.kv_heads} kv heads of {args.dim}, pages of {args.page}; one layer:")
    for dtype in args.dtype:
        for batch in args.batch:
            for context in args.context:
                steps = candidates(args, batch, context, dtype)
                times = {name: [] for name in steps}
                for step in steps.values():
                    step()
                for _ in range(args.repeats):
                    for name, step in steps.items():
                        times[name].append(timed(step) / args.layers)
                read = 2 * batch * args.kv_heads * context * args.dim * jnp.dtype(dtype).itemsize
                for name, seconds in times.items():
                    median, best = float(np.median(seconds)), min(seconds)
                    row = {
                        "dtype": dtype,
                        "batch": batch,
                        "context": context,
                        "name": name,
                        "median_s": median,
                        "best_s": best,
                    }
                    row |= {"bytes_per_s": read / median, "of_read_bandwidth": read / median / peak}
                    if args.json:
                        print(json.dumps(row), flush=True)
                    else:
                        print(
                            f"{dtype:9} batch {batch:3} context {context:5} {name:22} median {median * 1e6:8.0f} us, "
                            f"best {best * 1e6:8.0f} us, {read / median / 1e9:5.1f} GB/s, "
                            f"{read / median / peak:4.0%} of a read",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
