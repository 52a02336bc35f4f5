"""Run in a process with eight CPU devices: the largest difference of images from those of eager PyTorch.

Arguments are the pipeline, the mesh and the number of prompts; results are printed as JSON.
"""

import json
import sys
import tempfile
import warnings

import jax
import numpy as np

warnings.filterwarnings("ignore")
from tiny_pipelines import PIPELINES, call, copied  # noqa: E402

from torchax_serve import serve  # noqa: E402
from torchax_serve.diffusion.pipeline import pipeline_to_jax  # noqa: E402
from torchax_serve.distributed.mesh_shape import parse_mesh  # noqa: E402

name, mesh, num_prompts = sys.argv[1], parse_mesh(sys.argv[2], None), int(sys.argv[3])
prompts = ["a red fox", "snow", "a house", "the sea"][:num_prompts]
eager = PIPELINES[name](tempfile.mkdtemp())
eager.set_progress_bar_config(disable=True)
wanted = call(eager, prompt=prompts)
model = serve(copied(eager), mesh=mesh)
runtime = vars(model.pipeline.transformer)["_jax_runtime"]
own, parts = runtime._placed, []


def placed(arrays):
    found = own(arrays)
    parts.append(found[0].addressable_data(0).shape[0] / found[0].shape[0])
    return found


runtime._placed = placed
found = call(model.pipeline, prompt=prompts)
pipeline_to_jax(model.pipeline, latents_on_device=True)  # as on accelerators
on_device = call(model.pipeline, prompt=prompts)
matrices = [array for array in runtime.weights.values() if array.ndim == 2 and array.size >= 64 * 64]
share = sum(array.addressable_data(0).size for array in matrices) / sum(array.size for array in matrices)
difference = max(float(np.abs(each - wanted).max()) for each in (found, on_device))
print(
    json.dumps(
        {
            "difference": difference,
            "devices": len(jax.devices()),
            "largest_share": share,
            "rows_of_a_device": max(parts),
        }
    )
)
