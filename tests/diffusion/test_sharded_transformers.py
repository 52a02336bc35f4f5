"""Flux and Stable Diffusion 3 on eight devices, and what a plan says about them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from typer.testing import CliRunner

from sharding_rules import DIFFUSION_TABLES
from torchax_serve.cli.main import app
from torchax_serve.diffusion.sharding import place_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHAPES = {"flux-1-dev": "FluxTransformer2DModel", "stable-diffusion-3.5-large": "SD3Transformer2DModel"}


@pytest.mark.parametrize(
    ("name", "mesh", "num_prompts", "rows"),
    [
        ("flux", "model=8", 1, 1),
        ("sd3", "model=8", 1, 1),
        ("flux", "data=2,model=4", 2, 1 / 2),  # a row for each prompt
        ("sd3", "data=4,model=2", 2, 1 / 4),  # two rows for each prompt
        ("flux", "data=4,model=2", 3, 1),  # not divided: every device has all rows
    ],
)
def test_eight_devices_give_the_images_of_one(name, mesh, num_prompts, rows):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "eight_devices.py"), name, mesh, str(num_prompts)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] < 1e-3
    assert found["devices"] == 8
    assert found["largest_share"] < (0.5 if "8" in mesh else 0.8), "weights are on every device"
    assert found["rows_of_a_device"] == rows


def test_every_table_fits_its_published_shape():
    assert set(SHAPES.values()) == set(DIFFUSION_TABLES)
    for shape, class_name in SHAPES.items():
        config = json.loads((ROOT / "benchmarks" / "shapes" / f"{shape}.json").read_text())
        with torch.device("meta"):
            module = getattr(diffusers, class_name).from_config(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        number = 2 if class_name.startswith("SD3") else 8  # 38 heads divide by 2, 24 by 8
        placed = place_tensors(class_name, dict(module.config), shapes, {"model": number})
        whole = sum(tensor.numel() for tensor in module.state_dict().values())
        share = sum(each.bytes_per_device({"model": number}, 1) for each in placed.values())
        assert share < 1.1 * whole / number
        moved = [dim for each in placed.values() for dim in each.dims if dim.index is not None]
        assert all(sorted(dim.index.tolist()) == list(range(dim.size_before)) for dim in moved), "zeros were added"


def test_plan_of_flux(tmp_path):
    shape = ROOT / "benchmarks" / "shapes" / "flux-1-dev.json"
    small = json.loads(shape.read_text()) | {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2}
    small |= {"joint_attention_dim": 64}
    path = tmp_path / "flux-small.json"
    path.write_text(json.dumps(small))
    done = CliRunner().invoke(app, ["plan", str(path), "--topology", "cpu:1", "--image-size", "64x64", "--json"])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    module = diffusers.FluxTransformer2DModel.from_config(small)
    assert report["weights_bytes"] == 2 * sum(each.numel() for each in module.parameters())
    assert report["fits"]
    done = CliRunner().invoke(app, ["plan", str(path), "--topology", "cpu:1", "--max-model-len", "64"])
    assert done.exit_code == 2
    assert "--max-model-len: expected with a language model alone" in done.stderr
    done = CliRunner().invoke(app, ["plan", str(path), "--topology", "cpu:1", "--image-size", "65x64"])
    assert done.exit_code == 2
    assert "multiples of 16 pixels" in done.stderr
