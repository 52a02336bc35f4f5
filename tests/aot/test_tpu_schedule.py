"""The time that decode attention takes on v5e, v6e and tpu7x by the compiler's schedule, beside that of its memory.

Needs ``pip install libtpu`` in the version that fits the installed JAX.
"""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tpu_schedule
from tpu_shapes import CHIPS, Shape

# At most this share of the time that reading a block takes, in bundles of the final program. Blocks that are cut are
# masked, one or two of a context.
LIMIT = 0.7
WAYS = ("whole", "before a part", "cut")
HEADS_OF_64, INT8 = str(Shape(heads=8, group=8, dim=64)), str(Shape(pool_dtype="int8"))
# tpu7x reads the 8 MiB of a block in the time of 4987 cycles. Its two units for products take a register of 16 keys in
# 4 cycles, because they turn it, and one of values in 2: the 1024 of each in a block take 3072, 62 % of that time. None
# of them multiplies int8; as bfloat16, 4 MiB of it are as many registers, so that int8 takes longer than its memory.
# Those of v5e and v6e do, 32 keys a register. Keys that stream past the queries instead take 4 cycles a register, too.
# Heads of 64 are turned by half of their lanes before they are multiplied; a block's first products wait for that.
TPU7X_BUNDLES = {HEADS_OF_64: (LIMIT, LIMIT, 0.75), INT8: (0.81, 0.79, 0.82)}
# Cycles in which nothing starts count here, masks and branches keep products and starts of DMAs apart.
TPU7X_CYCLES = {HEADS_OF_64: (0.74, 0.75, 0.82), INT8: (1.36, 1.37, 1.41)}
TPU7X_CUT_CYCLES = 0.82


def limits_of(chip, way, shape):
    """In bundles, and in cycles."""
    if chip != "tpu7x":
        return LIMIT, LIMIT
    at = WAYS.index(way)
    bundles = TPU7X_BUNDLES.get(str(shape), (LIMIT, LIMIT, LIMIT))
    return bundles[at], TPU7X_CYCLES.get(str(shape), (LIMIT, LIMIT, TPU7X_CUT_CYCLES))[at]


@functools.cache
def schedule(chip):
    """The shares of DMA time of each shape, out of a process of its own."""
    script = Path(tpu_schedule.__file__)
    made = subprocess.run([sys.executable, str(script), chip], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", tpu_schedule.SHAPES, ids=str)
def test_decode_takes_its_share_of_the_time_it_reads_at_most(shape, way, chip):
    shares, (bundles, cycles) = schedule(chip)[str(shape)], limits_of(chip, way, shape)
    assert 0.05 < shares["bundles"][way] <= bundles
    assert shares["bundles"][way] < shares["cycles"][way] <= cycles


WAYS_IN_A_LOOP = """
 0x0   :  { %1 = nop }
 0x1 LB: > { %2 = nop }
 0x2 LB: >> { %3 = sbr.rel (%p1) target bundleno = 13 (0xd) }
 0x3   : >> { %4 = sbr.rel (%p2) target bundleno = 7 (0x7) }
 0x4   : >> { %5 = vmatpush3 }
 0x5   : >> { %6 = vmatpush3 ;; %7 = dma.general }
 0x6   :  {} /* End region 7 */
 0x7   : >> { %8 = sbr.rel (%p3) target bundleno = 13 (0xd) }
 0x8   : >> { %9 = vmatpush3 }
 0x9 LB: >>> { %10 = dma.general  ;;  %11 = nop }
 0xa   : >>> { %12 = dma.general }
 0xb   : >> { %13 = nop }
 0xc   : >> { %14 = nop }
 0xd   : >> { %15 = nop }
 0xe   : > { %16 = nop }
"""


# The same with jumps to regions, as the final program has them.
WITH_REGIONS = (
    re.sub(r"target bundleno = (\d+) \(\w+\)", r"target = $region\1", WAYS_IN_A_LOOP)
    .replace("0x7   : >> {", "0x7   : >> { /* Start/End empty region 7 */")
    .replace("%15 = nop }", "%15 = nop } /* Start/End empty region 13 :: Start region 2 */")
)


@pytest.mark.parametrize("text", [WAYS_IN_A_LOOP, WITH_REGIONS], ids=["numbers", "regions"])
def test_ways_through_a_loop_are_told_apart_and_dmas_counted_as_often_as_they_run(text):
    # Both run bundles 2, 3, 7 and 13. The other has five of its own, two of which run twice more for six pieces.
    assert tpu_schedule.ways_of(text, 6) == [(2, 1, 4 + 3), (1, 2, 4 + 5 + 2 * 2)]
