"""Paged attention on a GPU: the Pallas kernels beside torch's SDPA and the memory bandwidth, all in one run.

    python benchmarks/attention_gpu.py --batch 1 8 64 --context 2048 8192 --prompt 2048 8192 --out results.json

``--variants`` measures the kernels for Hopper with other constants, too: ``mosaic_prefill.MAX_KEYS=64``. Several with
commas between them are one variant.

Each number is the median time of one layer over interleaved repetitions of a program of several layers with separate
caches, which together are larger than the GPU's L2 cache. Torch gets dense keys and values of the same lengths, and
writes nothing. The peaks are measured in the same run: a copy within the device's memory, counting bytes read and
written, and a large product in bfloat16.
"""

import argparse
import ast
import contextlib
import functools
import json
import os
import statistics
import subprocess
import time
import unittest.mock
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the device

import jax
import jax.numpy as jnp
import torch

from model_adapters.ops import AttentionArgs, decode_attention, paged_attention, use

DTYPE, ELEMENT_BYTES = jnp.bfloat16, 2


def timed(step):
    """Seconds of a step that ends with its arrays computed."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def medians(steps, repeats):
    """Median seconds of each step, in turns, after two that do not count; the reason instead where a step fails."""
    times, failures = {name: [] for name in steps}, {}
    for name, step in steps.items():
        try:
            print(f"{name:34} first call, compiled in it: {timed(step):6.1f} s", flush=True)
            timed(step)
        except Exception as error:
            failures[name] = str(error).splitlines()[0][:200]
    for _ in range(repeats):
        for name, step in steps.items():
            if name not in failures:
                times[name].append(timed(step))
    return {name: statistics.median(found) for name, found in times.items() if found}, failures


def synchronized(function):
    def step():
        function()
        torch.cuda.synchronize()

    return step


def peaks():
    """Bytes per second of a copy, read and written, and operations per second of a product in bfloat16."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target, side = torch.empty_like(source), 8192
    left, right = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    steps = {"copy": synchronized(lambda: target.copy_(source)), "product": synchronized(lambda: left @ right)}
    found, _ = medians(steps, 10)
    return 2 * source.nbytes / found["copy"], 2 * side**3 / found["product"]


@contextlib.contextmanager
def constants(variant):
    """Sets constants of modules, ``module.NAME=value``."""
    with contextlib.ExitStack() as stack:
        if variant:  # no kernel that was traced with other constants
            jax.clear_caches()
            stack.callback(jax.clear_caches)
        for each in variant.split(",") if variant else ():
            place, value = each.split("=")
            stack.enter_context(unittest.mock.patch(f"model_adapters.ops.gpu.{place}", ast.literal_eval(value)))
        yield


def programs(op, implementation, q, pools, arrays, scale, variant=""):
    """Runs the op on all layers in one program that is given their pools."""

    def layers(q, pools):
        new = []
        for pool in pools:
            out, pool = op(q, arrays[0], arrays[1], pool, *arrays[2:], AttentionArgs(scale))
            q, _ = q + out, new.append(pool)
        return q, new

    state = []

    def step():
        if not state:  # compiled in the first call, so that a failure is that of this implementation
            with use(op.__name__, implementation), constants(variant):
                program = jax.jit(layers, donate_argnums=1).lower(q, pools).compile()
            state.extend((program, jax.jit(lambda pools: [pool + 0 for pool in pools])(pools)))
        out, state[1] = state[0](q, state[1])
        jax.block_until_ready(out)

    return step


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, DTYPE)


def pages_of(args, batch, context):
    """Pools of all layers and a page table ``int32[batch, pages]`` in random order."""
    pages = -(-context // args.page)
    shape = (batch * pages, args.kv_heads, args.page, 2 * args.dim)
    table = jax.random.permutation(jax.random.key(0), batch * pages).reshape(batch, pages).astype(jnp.int32)
    return [normal(layer, *shape) for layer in range(args.layers)], table


def sdpa(args, batch, num_queries, context):
    """Torch's attention of the last queries of dense sequences."""

    def dense(heads, length):
        return torch.randn(batch, heads, length, args.dim, device="cuda", dtype=torch.bfloat16)

    q = dense(args.heads, num_queries)
    layers = [(dense(args.kv_heads, context), dense(args.kv_heads, context)) for _ in range(args.layers)]
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)

    def step():
        for k, v in layers:
            attend(q, k, v, is_causal=num_queries > 1)

    return synchronized(step)


def implementations(args, op, *arrays):
    """Steps of each implementation and of each variant of the kernels for Hopper."""
    made = {name: programs(op, name, *arrays, args.dim**-0.5) for name in args.implementations}
    for variant in args.variants:
        made[variant] = programs(op, "gpu-mosaic", *arrays, args.dim**-0.5, variant)
    return made


def decode_steps(args, batch, context):
    """A decode step of each implementation."""
    q = normal(1, batch, args.heads, args.dim)
    k, v = (normal(seed, batch, args.kv_heads, args.dim) for seed in (2, 3))
    pools, table = pages_of(args, batch, context)
    arrays = (k, v, table, jnp.full((batch,), context, jnp.int32), jnp.zeros((batch,), jnp.int32))
    made = implementations(args, decode_attention, q, pools, arrays)
    return {**made, "torch SDPA, dense": sdpa(args, batch, 1, context)}


def prefill_steps(args, length):
    """A prefill of one prompt by each implementation."""
    q = normal(1, length, args.heads, args.dim)
    k, v = (normal(seed, length, args.kv_heads, args.dim) for seed in (2, 3))
    pools, table = pages_of(args, 1, length)
    arrays = (k, v, table, jnp.full((1,), length, jnp.int32), jnp.asarray([0, length], jnp.int32))
    made = implementations(args, paged_attention, q, pools, arrays)
    return {**made, "torch SDPA, dense": sdpa(args, 1, length, length)}


def row_of(args, kind, batch, context, name, seconds, bandwidth, flops):
    """A measurement: what was reached, and its part of the peak that bounds it."""
    row = {"kind": kind, "batch": batch, "context": context, "name": name, "seconds": seconds}
    if kind == "decode":
        rate = 2 * batch * args.kv_heads * context * args.dim * ELEMENT_BYTES / seconds
        print(
            f"decode  batch {batch:3} context {context:6} {name:18} {seconds * 1e6:8.0f} us {rate / 1e9:7.0f} GB/s "
            f"{rate / bandwidth:4.0%}",
            flush=True,
        )
        return row | {"bytes_per_s": rate, "of_peak": rate / bandwidth}
    rate = 2 * args.heads * context**2 * args.dim / seconds  # causal: half of the scores
    print(
        f"prefill         prompt  {context:6} {name:18} {seconds * 1e6:8.0f} us {rate / 1e12:7.0f} TFLOP/s "
        f"{rate / flops:4.0%}",
        flush=True,
    )
    return row | {"flops_per_s": rate, "of_peak": rate / flops}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--context", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--prompt", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--implementations", nargs="+", default=["gpu-triton", "gpu-mosaic"])
    parser.add_argument("--variants", nargs="*", default=[])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bandwidth, flops = peaks()
    device = torch.cuda.get_device_name()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    about = {
        "device": device,
        "driver": driver,
        "jax": jax.__version__,
        "torch": torch.__version__,
        "copy_bytes_per_s": bandwidth,
        "bfloat16_flops_per_s": flops,
        "options": {k: v for k, v in vars(args).items() if k != "out"},
    }
    print(
        f"{device}: copy {bandwidth / 1e9:.0f} GB/s, product {flops / 1e12:.0f} TFLOP/s; torch {torch.__version__}, "
        f"jax {jax.__version__}, driver {driver}",
        flush=True,
    )
    rows, failures = [], []
    calls = [("decode", b, c, functools.partial(decode_steps, args, b, c)) for b in args.batch for c in args.context]
    calls += [("prefill", 1, length, functools.partial(prefill_steps, args, length)) for length in args.prompt]
    for kind, batch, context, make in calls:
        found, failed = medians(make(), args.repeats)
        rows += [
            row_of(args, kind, batch, context, name, s / args.layers, bandwidth, flops) for name, s in found.items()
        ]
        failures += [
            {"kind": kind, "batch": batch, "context": context, "name": n, "why": why} for n, why in failed.items()
        ]
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps({**about, "rows": rows, "failures": failures}, indent=1) + "\n")
    for each in failures:
        print("failed:", each)


if __name__ == "__main__":
    main()
