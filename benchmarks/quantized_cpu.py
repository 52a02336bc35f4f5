"""Products with quantized weights on a CPU, next to bfloat16 and packed bfloat16, in turns in one run.

    python benchmarks/quantized_cpu.py --rows 1 8 32 512

Measured are all matrix products of one decode step of a model of 184 million parameters (12 layers of width 1024, head
of 32,000), each with memory of its own. Processor time counts all threads, so that it says something on a busy machine
too; with one thread (NPROC=1) no thread waits for another.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops import linear
from model_adapters.ops.compressed_weight import compress_weight, substituted
from model_adapters.ops.cpu import ffi
from model_adapters.ops.cpu.huge_pages import in_huge_pages
from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme
from model_adapters.quantization.cpu_layout import lay_out

LAYER = [(1024, 1024), (512, 1024), (512, 1024), (1024, 1024), (3072, 1024), (3072, 1024), (1024, 3072)]
KINDS = {
    "bf16": None,
    "packed": None,
    "int8": Scheme(8, 32, "int8"),
    "int8 by row": Scheme(8, 1 << 20, "int8"),
    "int8 floats": Scheme(8, 32, "none"),
    "int4": Scheme(4, 32, "int8"),
    "int4 by 128": Scheme(4, 128, "int8", act_group=32),
    "int4 floats": Scheme(4, 128, "none"),
}


def make(kind, shape, rng):
    """A weight of `shape`; its numbers do not matter for the time."""
    if kind in ("bf16", "packed"):
        dense = jnp.asarray(rng.standard_normal(shape, np.float32) * 0.02, jnp.bfloat16)
        if kind == "bf16":
            return in_huge_pages(dense)
        packed = compress_weight(dense)
        assert packed is not None, "no packed weights on this processor"
        return jax.tree.map(in_huge_pages, packed)
    scheme = KINDS[kind]
    bound = 8 if scheme.bits == 4 else 128
    values = jnp.asarray(rng.integers(-bound, bound, shape, np.int8))
    groups = -(-shape[1] // scheme.group)
    scale = jnp.asarray(rng.uniform(0.001, 0.002, (shape[0], groups)), jnp.float16)
    held = lay_out(QuantizedWeight(values, scale, None, None, scheme))
    assert held.scheme.layout == "cpu", "no kernel for quantized weights on this processor"
    return jax.tree.map(in_huge_pages, held)


def step_of(kind, shapes, weights, rows):
    """A function that runs all products of a step in one program."""
    inputs = {k: jnp.asarray(np.random.default_rng(k).standard_normal((rows, k)), jnp.bfloat16) for k in (1024, 3072)}

    def step(inputs, weights):
        total = jnp.zeros((), jnp.float32)
        with substituted({str(i): weight for i, weight in enumerate(weights)}) as arrays:
            for i, (_, columns) in enumerate(shapes):
                # A chain, as layers are: the next product waits for this one.
                out = linear(inputs[columns] + total.astype(jnp.bfloat16) * 0, arrays[str(i)])
                total += out[0, 0].astype(jnp.float32)
        return total

    program = jax.jit(step).lower(inputs, weights).compile()
    return lambda: program(inputs, weights).block_until_ready()


def timed(function):
    """Wall and processor seconds of one call."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - begin, time.process_time() - begin_cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["bf16", "packed", "int8", "int4"], choices=list(KINDS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    if (reason := ffi.missing()) is not None:
        raise SystemExit(f"no C++ kernels: {reason}")
    shapes, rng = LAYER * args.layers + [(32000, 1024)], np.random.default_rng(0)
    held = {kind: [make(kind, shape, rng) for shape in shapes] for kind in args.kinds}
    num_bytes = {kind: sum(each.nbytes for each in weights) for kind, weights in held.items()}
    num_products = sum(n * k for n, k in shapes)
    for rows in args.rows:
        steps = {kind: step_of(kind, shapes, held[kind], rows) for kind in args.kinds}
        times = {kind: [] for kind in args.kinds}
        for step in steps.values():
            step()
        for _ in range(args.repeats):
            for kind, step in steps.items():
                times[kind].append(timed(step))
        base = np.median([cpu for _, cpu in times.get("packed") or times[args.kinds[0]]])
        for kind, seconds in times.items():
            wall, cpu = (float(np.median(each)) for each in zip(*seconds, strict=True))
            best = min(each for each, _ in seconds)
            row = {"rows": rows, "kind": kind, "bytes": num_bytes[kind], "median_s": wall, "best_s": best, "cpu_s": cpu}
            row |= {"bytes_per_s": num_bytes[kind] / best, "times_packed": base / cpu}
            if args.json:
                print(json.dumps(row), flush=True)
                continue
            print(
                f"rows {rows:4} {kind:12} {num_bytes[kind] / 1e6:6.1f} MB  median {wall * 1e3:8.2f} ms, best "
                f"{best * 1e3:8.2f} ms, processor {cpu * 1e3:8.2f} ms ({base / cpu:.2f} x), "
                f"{num_bytes[kind] / best / 1e9:5.1f} GB/s, {2 * rows * num_products / best / 1e9:6.0f} GOP/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
