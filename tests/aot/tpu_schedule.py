"""What a block costs decode attention by the compiler's own schedule, against the time that its pages take.

As a script: ``python tpu_schedule.py CHIP`` prints a JSON object, by shape the shares of the ways below by either
measure. A process of its own, because the compiler is asked for its schedules when it is loaded.

The loop over blocks has a way for blocks that are wholly seen, behind which a whole one is read; one for such blocks
behind which a part of one is read, or nothing; and some for blocks that are cut, by the size of what is computed with.
Of the latter the one for all of a block is told, with all that may be read behind it. A block is 2048 positions of the
shapes here, 4096 of those with heads of 64.

A schedule is a list of bundles, one a cycle where nothing stalls; latencies of DMAs and stalls on memory are not in it.
It is told twice. ``bundles`` are those of the final program, which is what other kernels are compared by. Most cycles
in which nothing starts, because a unit is busy or a result not there yet, are gone from it, merged into delays: on v6e
and tpu7x, where products wait for their units, up to half of them. ``cycles`` is the schedule as it is after registers
are allocated, where such a cycle is an empty bundle: longer, and nearer to what a chip will take.
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

from model_adapters.ops.tpu.page_buffers import Blocks

SHAPES = (
    Shape(capacity=16384),
    Shape(heads=8, group=1, capacity=16384),
    Shape(heads=4, group=2, dim=256, capacity=16384),
    Shape(heads=8, group=8, dim=64, capacity=16384),
    Shape(pool_dtype="int8", capacity=16384),
)
BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s+((?:[A-Z]{2}\s*)*):\s*(>*)\s*\{(.*)$")
DMA = re.compile(r"dma\.(?:general|hbm_to_vmem)")
JUMP = re.compile(r"sbr\.rel \(!?%\S+\) target (?:bundleno = (\d+)|= \$region(\d+))")
REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
COMMENT = re.compile(r"/\*.*?\*/")
NOTHING = re.compile(r"/\*.*?\*/|[}\s]")
PRODUCT = re.compile(r"vmatpush|vmatmul")
LOOKAHEAD = 20
DUMP_OF = {"bundles": "final_bundles", "cycles": "packed-bundles-post-ra"}
"""The compiler's file for each measure."""


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


def ways_of(text, num_pieces):
    """The ways through the loop with the most products: ``(products, DMA instructions, cycles)`` of each.

    A way is a branch with products. Every other branch counts as taken, and a loop inside as run once, but for one that
    starts the DMAs of a whole block several at a time.
    """
    bundles = read_bundles(text)

    def count(pattern, begin, end):
        return sum(len(pattern.findall(body)) for _, _, body in bundles[begin:end])

    loops = [loop for loop in loops_of(bundles) if loop[2] >= 2]
    begin, end, depth = max(loops, key=lambda loop: count(PRODUCT, *loop[:2]))
    inside = [loop for loop in loops if begin < loop[0] and loop[1] <= end and loop[2] > depth]
    jumps = [(i, to) for i, to in jumps_of(bundles) if begin <= i < end]  # over a way, or several of them
    branches = [(i + 1, to) for i, to in jumps if i < to <= end and count(PRODUCT, i + 1, to)] or [(begin, end)]
    made = []
    for way in branches:
        if any(is_within(other, way) for other in branches if other != way):
            continue
        skipped = [other for other in branches if not is_within(way, other)]
        skipped = [one for one in skipped if not any(is_within(one, other) for other in skipped if other != one)]
        taken = [loop for loop in inside if not any(is_within(loop, other) for other in skipped)]
        cycles = end - begin - sum(to - at for at, to in skipped)
        for at, to, _ in taken:
            dmas = count(DMA, at, to)
            cycles += (num_pieces // dmas - 1) * (to - at) if dmas > 1 else 0
        made.append((count(PRODUCT, *way), count(DMA, *way), cycles))
    return made


def jumps_of(bundles):
    """``(from, to)`` of each jump, whose target is a bundle or a region that begins with one."""
    region_at = {number: i for i, (_, _, body) in enumerate(bundles) for number in REGION.findall(body)}
    found = [(i, JUMP.search(COMMENT.sub("", body))) for i, (_, _, body) in enumerate(bundles)]
    return [(i, int(jump[1]) if jump[1] else region_at[jump[2]]) for i, jump in found if jump]


def is_within(inner, outer):
    """Whether the bundles of one range are bundles of the other."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def shares_of_dma_time(shape, chip, dumps):
    """By measure: what each way that a whole block may take is of the cycles that reading it takes."""
    compile_call("decode_attention", shape, chip)
    blocks = Blocks.of(shape.pool, shape.capacity // shape.page)
    block_bytes = blocks.length * shape.heads * shape.width * shape.pool.dtype.itemsize
    dma_cycles = block_bytes / CHIPS[chip].hbm_gb_per_s * CHIPS[chip].clock_ghz
    shares = {}
    for measure, dump in DUMP_OF.items():
        (path,) = Path(dumps).glob(f"*decode_attention*-{dump}.txt")
        lengths = lengths_of_ways(path.read_text(), blocks.num_pieces)
        shares[measure] = {way: length / dma_cycles for way, length in lengths.items()}
    for dump in Path(dumps).iterdir():
        dump.unlink()
    return shares


def lengths_of_ways(text, num_pieces):
    """How long each way is that a whole block may take."""
    ways = ways_of(text, num_pieces)
    most = max(products for products, _, _ in ways)
    # By the number of DMA instructions: that of a part's loop, those of a whole block, or both.
    part, whole, cut = sorted((dmas, cycles) for products, dmas, cycles in ways if products == most)
    assert part[0] == 1 and cut[0] == whole[0] + 1, "the ways that read were not told apart"
    return {"whole": whole[1], "before a part": part[1], "cut": cut[1]}


if __name__ == "__main__":
    shares = {str(shape): shares_of_dma_time(shape, sys.argv[1], DUMPS.name) for shape in SHAPES}
    print(json.dumps(shares))
