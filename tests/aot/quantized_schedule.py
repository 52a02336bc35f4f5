"""What a tile of a quantized weight costs by the compiler's own schedule, against the time that its memory takes.

As a script: ``python quantized_schedule.py CHIP`` prints a JSON object, by form the microseconds of the schedule of a
tile, of reading it, and of reading it in bfloat16. A process of its own, as `tpu_schedule`, which reads the schedules.
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

from quantized_shapes import FORMS, bytes_of, compile_product
from tpu_schedule import PRODUCT, loops_of, read_bundles
from tpu_shapes import CHIPS, mesh_of

NAMES = ("int4 by row", "int4 by 128", "int4 by 32", "int8 by 128", "int8 by row")
TILE = 1024


def times_of(name, chip, dumps):
    """Microseconds of a tile of 1024 by 1024."""
    compile_product(FORMS[name], mesh_of(chip), "tpu")
    (path,) = Path(dumps).glob("*quantized_linear*-final_bundles.txt")
    bundles = read_bundles(path.read_text())

    def products(loop):
        return sum(len(PRODUCT.findall(body)) for _, _, body in bundles[loop[0] : loop[1]])

    begin, end, _ = max(loops_of(bundles), key=products)
    for dump in Path(dumps).iterdir():
        dump.unlink()
    per_us = 1e-3 / CHIPS[chip].hbm_gb_per_s
    return {
        "bundles": end - begin,
        "schedule": (end - begin) * 1e-3 / CHIPS[chip].clock_ghz,
        "memory": bytes_of(FORMS[name], out=TILE, columns=TILE) * per_us,
        "bfloat16": 2 * TILE * TILE * per_us,
    }


if __name__ == "__main__":
    print(json.dumps({name: times_of(name, sys.argv[1], DUMPS.name) for name in NAMES}))
