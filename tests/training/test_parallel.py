"""Training on eight devices has the losses of PyTorch, as training on one has; where weights lie."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec
from training_models import tiny_folder
from transformers import AutoModelForCausalLM

from torchax_serve.training import parallel

ROOT = Path(__file__).parents[2]


def test_fsdp_and_tensor_parallel_steps_are_those_of_pytorch(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
    }
    command = [sys.executable, str(Path(__file__).with_name("mesh_steps.py")), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["data2-fsdp2-model2 all same losses", "fsdp2 lora same losses"]


@pytest.fixture
def layout(tmp_path, monkeypatch):
    device = parallel.jax.devices()[0]
    monkeypatch.setattr(parallel.jax, "devices", lambda: [device] * 8)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(tmp_path))
    return parallel.Layout(model, {"fsdp": 4, "model": 2})


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (32, 32), ("model", "fsdp")),
        ("base_model.model.model.layers.0.self_attn.o_proj.base_layer.weight", (32, 32), ("fsdp", "model")),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", (64, 32), ("fsdp", None)),
        ("model.norm.weight", (32,), (None,)),
        ("model.layers.0.mlp.down_proj.weight", (30, 64), (None, "model")),
    ],
)
def test_where_weights_lie(layout, name, shape, axes):
    assert layout.of_weight(name, shape).spec == PartitionSpec(*axes)
