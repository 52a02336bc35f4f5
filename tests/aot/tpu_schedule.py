"""What the inner loops of decode attention cost by the compiler's own schedule, against the time that its pages take.

As a script: ``python tpu_schedule.py CHIP`` prints a JSON object, the shares of both loops by shape. A process of its
own, because the compiler is asked for its schedules when it is loaded.

There is a loop over whole blocks for all of a long row but its last three blocks, and one for those and for rows of
fewer: a block is 2048 positions of the shapes here, 4096 of those with heads of 64.

A schedule is a list of bundles, one a cycle where nothing stalls; latencies of DMAs and stalls on memory are not in it.
It is read as it is after registers are allocated: a cycle in which nothing starts, because a unit is busy or a result
not there yet, is an empty bundle in it. In the final one most of these are gone, merged into delays, so that its length
is no number of cycles: on v6e and tpu7x, where products wait for their units, up to half of them would be missing.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    DUMPS = tempfile.TemporaryDirectory()
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMPS.name} --xla_jf_dump_llo_text=true"
    os.environ["JAX_PLATFORMS"] = "cpu"

from tpu_shapes import CHIPS, Shape, compile_call

from model_adapters.ops.tpu.pages import Blocks

SHAPES = (
    Shape(capacity=16384),
    Shape(heads=8, group=1, capacity=16384),
    Shape(heads=4, group=2, dim=256, capacity=16384),
    Shape(heads=8, group=8, dim=64, capacity=16384),
    Shape(pool_dtype="int8", capacity=16384),
)
BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s+((?:[A-Z]{2}\s*)*):\s*(>*)\s*\{(.*)$")
DMA = re.compile(r"dma\.(?:general|hbm_to_vmem)")
NOTHING = re.compile(r"/\*.*?\*/|[}\s]")
PRODUCT = re.compile(r"vmatpush|vmatmul")
LOOKAHEAD = 20


def read_bundles(text):
    """Of each bundle: whether a loop begins with it, its depth in loops, its instructions."""
    bundles = []
    for line in text.splitlines():
        if found := BUNDLE.match(line):
            marks, depth, body = found.groups()
            is_empty = not NOTHING.sub("", body)
            # Empty bundles carry no depth.
            bundles.append(["LB" in marks, bundles[-1][1] if is_empty and bundles else len(depth), body])
    for i in range(1, len(bundles) - 1):  # neither do some that copy values between iterations
        begins, depth, _ = bundles[i]
        before = bundles[i - 1][1]
        ahead = bundles[i + 1 : i + LOOKAHEAD]
        if not begins and depth < before and any(d >= before and not b for b, d, _ in ahead):
            bundles[i][1] = before
    return bundles


def loops_of(bundles):
    """All loops as ``(begin, end, depth)``, outer ones before those inside."""
    loops, open_loops = [], []
    for i, (begins, depth, _) in enumerate([*bundles, (False, -1, "")]):
        while open_loops and (depth < open_loops[-1][1] or (begins and depth == open_loops[-1][1])):
            begin, at = open_loops.pop()
            loops.append((begin, i, at))
        if begins:
            open_loops.append((i, depth))
    return sorted(loops, key=lambda loop: (loop[0], -loop[1]))


def inner_loop_cycles(text, num_pieces):
    """Cycles of each loop over whole blocks, every branch of it counted, those for the ends of rows too.

    These loops have the most products, all of them as many. Loops inside of one run for the ends of rows and count
    once, but for the one that starts the DMAs of a whole block several at a time.
    """
    bundles = read_bundles(text)

    def count(pattern, loop):
        return sum(len(pattern.findall(body)) for _, _, body in bundles[loop[0] : loop[1]])

    loops = [loop for loop in loops_of(bundles) if loop[2] >= 2]
    most = max(count(PRODUCT, loop) for loop in loops)
    made = []
    for begin, end, depth in [loop for loop in loops if count(PRODUCT, loop) == most]:
        assert count(DMA, (begin, end)) > 0, "the loop reads nothing: the wrong one was found"
        inside = [loop for loop in loops if begin < loop[0] and loop[1] <= end and loop[2] > depth]
        started = [(count(DMA, loop), loop) for loop in inside]
        again = sum((num_pieces // dmas - 1) * (loop[1] - loop[0]) for dmas, loop in started if dmas > 1)
        made.append(end - begin + again)
    return made


def shares_of_dma_time(shape, chip, dumps):
    """The cycles of the loops for long rows and for ends over those that reading a block takes."""
    compile_call("decode_attention", shape, chip)
    (path,) = Path(dumps).glob("*decode_attention*-packed-bundles-post-ra.txt")
    blocks = Blocks.of(shape.pool, shape.capacity // shape.page)
    long_rows, ends = inner_loop_cycles(path.read_text(), blocks.num_pieces)
    for dump in Path(dumps).iterdir():
        dump.unlink()
    block_bytes = blocks.length * shape.heads * shape.width * shape.pool.dtype.itemsize
    dma_cycles = block_bytes / CHIPS[chip].hbm_gb_per_s * CHIPS[chip].clock_ghz
    return {"long rows": long_rows / dma_cycles, "ends": ends / dma_cycles}


if __name__ == "__main__":
    shares = {str(shape): shares_of_dma_time(shape, sys.argv[1], DUMPS.name) for shape in SHAPES}
    print(json.dumps(shares))
