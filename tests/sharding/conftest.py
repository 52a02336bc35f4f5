"""Checks that need eight devices, as programs of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("mesh_checks.py")
ROOT = CHECKS.parents[2]


@pytest.fixture(scope="session")
def on_eight():
    def run(*arguments):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        done = subprocess.run(
            [sys.executable, str(CHECKS), *arguments], capture_output=True, text=True, env=environment, timeout=900
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return run
