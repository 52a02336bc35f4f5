"""Run in a process with eight CPU devices: the largest difference of images from those of eager PyTorch."""

import json
import sys
import tempfile
import warnings

import jax
import numpy as np

warnings.filterwarnings("ignore")
from tiny_pipelines import PIPELINES, call, copied  # noqa: E402

from torchax_serve import serve  # noqa: E402

eager = PIPELINES[sys.argv[1]](tempfile.mkdtemp())
eager.set_progress_bar_config(disable=True)
wanted = call(eager)
model = serve(copied(eager), mesh={"model": 8})
found = call(model.pipeline)
weights = vars(model.pipeline.transformer)["_jax_runtime"].weights
matrices = [array for array in weights.values() if array.ndim == 2 and array.size >= 64 * 64]
share = sum(array.addressable_data(0).size for array in matrices) / sum(array.size for array in matrices)
print(
    json.dumps(
        {"difference": float(np.abs(found - wanted).max()), "devices": len(jax.devices()), "largest_share": share}
    )
)
