"""Products of experts by the compiler's own schedules: XLA's ragged product and Tokamax's kernel.

As a script: ``python grouped_schedule.py CHIP`` prints a JSON object. A process of its own, as `tpu_schedule`, which
reads the schedules. Needs tokamax, as the extra of that name installs it.

Both are loops whose body multiplies some rows with all of one expert's weight. The compiler has no estimate of the time
of such kernels: it counts -1 s for Tokamax's, and for XLA's bytes over bandwidth. So the time here is the longer of the
bodies' bundles over the clock and of the weights' bytes over bandwidth. A body runs for each tile of rows and once more
for each expert that begins inside of a tile. What Tokamax computes in front of its kernel, some ten small programs
where XLA has one, is not counted.
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

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tpu_schedule import loops_of, read_bundles
from tpu_shapes import CHIPS, mesh_of

INNER, COLUMNS, EXPERTS = 2048, 768, 32
"""Qwen3 30B-A3B: a quarter of its experts, as one of four devices has them."""
ROWS = (512, 2048, 8192)
TILES = (128, 256, 512)
PUSH, MULTIPLY = re.compile("vmatpush"), re.compile("vmatmul")
KERNELS = {"xla": "ragged-dot-none", "tokamax": "gmm_megablox"}
CHIP_VERSIONS = {"v5e": "TPU_V5E", "v6e": "TPU_V6E", "tpu7x": "TPU_7X"}


def xla(x, weight, sizes):
    return jax.lax.ragged_dot(x, weight, sizes, preferred_element_type=jnp.float32)


def tokamax_with(tile, chip):
    """Tokamax's kernel with tiles of so many rows; it asks the devices in use what they are, so they are named."""
    from absl import flags
    from jax._src.pallas.mosaic import tpu_info
    from jax.experimental.pallas import tpu as pltpu
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    info = tpu_info.get_tpu_info_for_chip(getattr(tpu_info.ChipVersion, CHIP_VERSIONS[chip]), 1)
    tpu_info.get_tpu_info = pltpu.get_tpu_info = lambda *args, **kwargs: info
    pallas_mosaic_tpu.PallasMosaicTpuRaggedDot.supported_on = lambda self, device: True
    config = pallas_mosaic_tpu.Config(tile_m=tile, tile_k=INNER, tile_n=COLUMNS)
    kernel = pallas_mosaic_tpu.PallasMosaicTpuRaggedDot(config=config)
    return lambda x, weight, sizes: kernel(x, weight, group_sizes=sizes, preferred_element_type=jnp.bfloat16)


def body_of(function, rows, chip, kind):
    """Bundles, pushes of weights and products of the loop of a kernel; None if it does not fit into the chip."""
    everywhere = NamedSharding(mesh_of(chip), PartitionSpec())

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=everywhere)

    arrays = shape(rows, INNER), shape(EXPERTS, INNER, COLUMNS), shape(EXPERTS, dtype=jnp.int32)
    for dump in Path(DUMPS.name).iterdir():
        dump.unlink()
    with jax.set_mesh(mesh_of(chip)):
        try:
            jax.jit(function).lower(*arrays).compile()
        except jax.errors.JaxRuntimeError as error:
            if "vmem" not in str(error):
                raise
            return None
    found = Path(DUMPS.name).glob(f"*{KERNELS[kind]}*-final_bundles.txt")
    (path,) = [path for path in found if "schedule-analysis" not in path.name]
    bundles = read_bundles(path.read_text())

    def count(pattern, loop):
        return sum(len(pattern.findall(body)) for _, _, body in bundles[loop[0] : loop[1]])

    loop = max(loops_of(bundles), key=lambda loop: count(MULTIPLY, loop))
    return {"bundles": loop[1] - loop[0], "pushes": count(PUSH, loop), "products": count(MULTIPLY, loop)}


def seconds(body, tile, rows, chip, num_parts=1.0):
    """The longer of the schedule and of reading the weights; a body may take a part of a weight at a time."""
    num_bodies = (rows // tile + EXPERTS - 1) * num_parts
    schedule_s = num_bodies * body["bundles"] / CHIPS[chip].clock_ghz * 1e-9
    return max(schedule_s, EXPERTS * INNER * COLUMNS * 2 / CHIPS[chip].hbm_gb_per_s * 1e-9)


def times_of(chip):
    ours = {tile: body_of(tokamax_with(tile, chip), max(ROWS), chip, "tokamax") for tile in TILES}
    fitting = {tile: body for tile, body in ours.items() if body is not None}
    found = {"tokamax": ours, "xla": {}, "us": {}}
    for rows in ROWS:
        body = body_of(xla, rows, chip, "xla")
        least = min(fitting)
        # Both push all of a weight, so that products tell the rows of XLA's tile.
        tile = least * body["products"] * fitting[least]["pushes"] // (fitting[least]["products"] * body["pushes"])
        found["xla"][rows] = {**body, "tile": tile}
        times = {f"tokamax {size}": seconds(each, size, rows, chip) for size, each in fitting.items() if size <= rows}
        times["xla"] = seconds(body, tile, rows, chip, fitting[least]["pushes"] / body["pushes"])
        found["us"][rows] = {name: round(each * 1e6, 1) for name, each in times.items()}
    return found


if __name__ == "__main__":
    print(json.dumps(times_of(sys.argv[1])))
