"""Tests on a machine with an NVIDIA GPU: `pytest -n 0 tests/gpu tests/ops/test_gpu_kernels.py`; others skip them."""

import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))  # the oracles of the ops
if jax.default_backend() != "gpu":
    collect_ignore_glob = ["test_*.py"]
