"""The time that decode attention takes on v5e, v6e and tpu7x by the compiler's schedule, beside that of its memory.

Needs ``pip install libtpu`` in the version that fits the installed JAX.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tpu_schedule
from tpu_shapes import CHIPS, Shape

# At most this share of the time that reading a block takes, in bundles of the final program. The limits below are of all
# cycles, those in which nothing starts counted: v6e and tpu7x have two units for products; either takes a register of 16
# keys in 4 cycles, because it turns them, and one of values in 2. The 1024 of each in a block of 8 MiB take 3072 cycles:
# 62 % of the time on tpu7x. No unit of tpu7x multiplies int8; as bfloat16, 4 MiB of it are as many registers: 123 % there,
# so that int8 takes longer than its memory. Those of v5e and v6e do, 32 keys a register: 34 % on v6e. Keys that stream
# past the queries instead take 4 cycles a register as well.
LIMIT = 0.7
WAYS = ("whole", "before a part", "cut")
TPU7X_LIMITS = {
    # Heads of 64 are turned by half of their lanes before they are multiplied; a block's first products wait for that.
    str(Shape(heads=8, group=8, dim=64)): (0.74, 0.75, 0.82),
    str(Shape(pool_dtype="int8")): (1.36, 1.37, 1.41),
}
CUT_LIMIT = 0.82  # on tpu7x: masks, and branches that keep products and starts of DMAs apart


def limit_of(chip, way, shape):
    if chip != "tpu7x":
        return LIMIT
    return TPU7X_LIMITS.get(str(shape), (LIMIT, LIMIT, CUT_LIMIT))[WAYS.index(way)]


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
    shares = schedule(chip)[str(shape)]
    assert 0.05 < shares["cycles"][way] <= limit_of(chip, way, shape)
    assert 0.05 < shares["bundles"][way] <= LIMIT


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


def test_ways_through_a_loop_are_told_apart_and_dmas_counted_as_often_as_they_run():
    # Both run bundles 2, 3, 7 and 13. The other has five of its own, two of which run twice more for six pieces.
    assert tpu_schedule.ways_of(WAYS_IN_A_LOOP, 6) == [(2, 1, 4 + 3), (1, 2, 4 + 5 + 2 * 2)]
