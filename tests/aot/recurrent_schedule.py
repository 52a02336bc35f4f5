"""What recurrent layers' kernels cost by the compiler's own schedule, beside the time that their states take in memory.

As a script: ``python recurrent_schedule.py CHIP`` prints a JSON object. A process of its own, as `tpu_schedule`, which
reads the schedules and says what their two measures are.

Of single tokens: the loop over blocks of heads, or rows, beside the time of reading and writing a block. Of chunks: the
loop over heads, for each head and chunk of 64 tokens. Of scans: the loop over tiles of tokens of some channels.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    DUMPS = tempfile.TemporaryDirectory()
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMPS.name} --xla_jf_dump_llo_text=true"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from recurrent_shapes import (
    DeltaShape,
    RecurrenceShape,
    ScanShape,
    SpaceShape,
    compile_recurrent,
    pool_bytes,
)
from tpu_schedule import DUMP_OF, loops_of, read_bundles
from tpu_shapes import CHIPS, mesh_of

from model_adapters.ops.tpu import state_chunks, state_steps

SHAPES = {
    "gated delta rule": DeltaShape(num_tokens=512),
    "Kimi delta attention": DeltaShape(key_heads=32, by_column=True, num_tokens=512),
    "state space": SpaceShape(num_tokens=512),
    "selective scan": ScanShape(num_tokens=512),
    "linear recurrence": RecurrenceShape(num_tokens=512),
}
"""Of Qwen3-Next and Kimi Linear, of Nemotron-H with 64 heads, of Jamba and FalconMamba, of RecurrentGemma."""
HEADS = ("gated_delta_rule", "state_space")
"""Ops whose states have heads."""


def schedules_of(shape, chip, dumps):
    """By measure: a block of single tokens beside its memory, and cycles of a head's chunk."""
    compile_recurrent(shape, mesh_of(chip))
    block_bytes = pool_bytes(shape) / shape.pool[0]
    if shape.op in HEADS:
        heads = state_steps.block_heads(jax.ShapeDtypeStruct(shape.pool, jnp.float32), shape.group)
        block_bytes *= heads / shape.pool[1]
    memory = 2 * block_bytes / CHIPS[chip].hbm_gb_per_s * CHIPS[chip].clock_ghz
    found = {"step": {"memory": round(memory)}, "chunk": {}} if shape.op in HEADS else {"tokens": {}}
    if shape.op == "selective_scan":
        found["step"] = {"memory": round(memory)}
    for measure, dump in DUMP_OF.items():
        for path in Path(dumps).glob(f"*{shape.op}_*-{dump}.txt"):
            if "analysis" in path.name:
                continue
            loops = loops_of(read_bundles(path.read_text()))
            if f"{shape.op}_step" in path.name:
                found["step"][measure] = longest(loops, 2 if shape.op in HEADS else 1)
            elif f"{shape.op}_tokens" in path.name:
                found["tokens"][measure] = longest(loops, max(depth for _, _, depth in loops))
            else:
                found["chunk"][measure] = longest(loops, 3) // state_chunks.NUM_PARALLEL
    for dump in Path(dumps).iterdir():
        dump.unlink()
    return found


def longest(loops, depth):
    """Length of the longest loop at this depth."""
    return max(end - begin for begin, end, at in loops if at == depth)


if __name__ == "__main__":
    print(json.dumps({name: schedules_of(shape, sys.argv[1], DUMPS.name) for name, shape in SHAPES.items()}))
