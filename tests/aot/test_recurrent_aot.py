"""Recurrent layers' TPU kernels compiled for v5e, v6e and tpu7x, without one: in place, and within their memory's time.

Needs ``pip install libtpu`` in the version that fits the installed JAX.
"""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import recurrent_schedule
from recurrent_shapes import (
    DeltaShape,
    ScanShape,
    SpaceShape,
    compile_recurrent,
    pool_bytes,
)
from tpu_shapes import CHIPS, mesh_of

SHAPES = (
    DeltaShape(),
    DeltaShape(key_heads=30, heads=30, dim=96, width=192, num_segments=5, num_tokens=300),  # of OLMo hybrid
    DeltaShape(key_heads=4, heads=4, dtype="float32", num_segments=8, num_tokens=8, by_column=True),
    SpaceShape(heads=24, dim=64, groups=1, states=256, num_segments=8, num_tokens=2048),  # of Falcon-H1
    SpaceShape(heads=80, dim=64, groups=1, states=128, num_segments=1, num_tokens=1),
    ScanShape(channels=7424, groups=2, num_segments=5, num_tokens=300),  # of Zamba
    ScanShape(channels=1536, dtype="float32", num_segments=1, num_tokens=1),  # of Mamba 130M
)
# At most this share of the time of a block's reads and writes, in cycles. Lanes of keys, queries and decays by column
# are spread by two units that take a register in four cycles, which is what tpu7x waits for.
STEP_LIMITS = {
    "gated delta rule": {"v5e": 0.4, "v6e": 0.6, "tpu7x": 1.0},
    "Kimi delta attention": {"v5e": 0.8, "v6e": 1.1, "tpu7x": 1.9},
    "state space": {"v5e": 0.7, "v6e": 0.9, "tpu7x": 1.5},
    "selective scan": {"v6e": 0.7},
}
CHUNK_LIMITS = {
    "gated delta rule": dict.fromkeys(CHIPS, 1500),
    "Kimi delta attention": {"v5e": 2250, "v6e": 1650, "tpu7x": 1600},
    "state space": dict.fromkeys(CHIPS, 500),
}
"""Cycles of a head and 64 tokens."""
SCAN_LIMITS = {"selective scan": {"v6e": 400}, "linear recurrence": {"v6e": 85}}
"""Cycles of 16 tokens of 512 channels."""


def pairs_of(limits):
    """Parametrizes a test by name and chip."""
    pairs = [(name, chip) for name, by_chip in limits.items() for chip in by_chip]
    return pytest.mark.parametrize(("name", "chip"), pairs)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_are_updated_in_place(shape, chip):
    compiled = compile_recurrent(shape, mesh_of(chip))
    assert compiled.memory_analysis().alias_size_in_bytes == pool_bytes(shape)
    pool = re.escape(f"f32[{','.join(map(str, shape.pool))}]")
    assert not re.findall(rf"= {pool}\S* copy(?:-start)?\(.*", compiled.as_text())


@functools.cache
def schedule(chip):
    """The figures of each shape, out of a process of its own."""
    script = Path(recurrent_schedule.__file__)
    made = subprocess.run([sys.executable, str(script), chip], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    return json.loads(made.stdout.splitlines()[-1])


@pairs_of(STEP_LIMITS)
def test_a_single_token_takes_its_share_of_its_memorys_time(name, chip):
    step = schedule(chip)[name]["step"]
    assert 0.1 < step["bundles"] / step["memory"] <= step["cycles"] / step["memory"] <= STEP_LIMITS[name][chip]


@pairs_of(CHUNK_LIMITS)
def test_a_chunk_takes_no_more_cycles(name, chip):
    assert 100 < schedule(chip)[name]["chunk"]["cycles"] <= CHUNK_LIMITS[name][chip]


@pairs_of(SCAN_LIMITS)
def test_a_tile_of_tokens_takes_no_more_cycles(name, chip):
    assert 20 < schedule(chip)[name]["tokens"]["cycles"] <= SCAN_LIMITS[name][chip]
