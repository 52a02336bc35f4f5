"""Quantized checkpoints on a mesh of two devices, in a process that has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quantized_folders import tiny_llama
from test_gptq_awq import awq_folder, gptq_folder
from test_mxfp4 import mxfp4_folder, tiny_gpt_oss
from thorough import thorough

SCRIPT = Path(__file__).with_name("mesh_of_two.py")
ROOT = SCRIPT.parents[3]


@pytest.mark.parametrize(
    ("make", "options", "num_dense"),
    [(awq_folder, {}, 0), thorough(gptq_folder, {"act_order": True}, 14)],
)
def test_tokens_on_two_devices_are_those_on_one(make, options, num_dense, tmp_path):
    """Weights whose columns are in an order of their own become dense there: a device does not have all columns."""
    folder, _ = make(tmp_path / "model", tiny_llama(torch.float16, intermediate_size=256), **options)
    check(folder, 14 - num_dense, makes_dense=num_dense > 0)


@pytest.mark.thorough
@pytest.mark.parametrize("axis", ["model", "expert"])
def test_experts_stay_quantized_on_each_device(axis, tmp_path):
    folder, _ = mxfp4_folder(tmp_path / "model", tiny_gpt_oss())
    check(folder, 4, axis)


def check(folder, num_stored, axis="model", *, makes_dense=False):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, str(SCRIPT), str(folder), str(num_stored), axis]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("same tokens")
    assert ("were made dense" in done.stderr) == makes_dense
