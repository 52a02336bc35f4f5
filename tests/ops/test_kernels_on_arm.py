"""Quantized products of the kernels compiled for ARM, in an emulator, against numpy."""

import os
import re
import subprocess
import sys
from pathlib import Path

import kernels_in_qemu
import pytest

HERE = Path(__file__).parent

PROCESSORS = {"products of bytes": "-march=armv8.2-a+dotprod+fp16", "NEON alone": "-march=armv8-a"}


@pytest.mark.thorough
@pytest.mark.skipif(kernels_in_qemu.missing() is not None, reason=str(kernels_in_qemu.missing()))
@pytest.mark.parametrize("flags", PROCESSORS.values(), ids=PROCESSORS)
def test_quantized_products_are_those_of_numpy_on_arm(flags):
    """The tests of the kernels once more, in a process whose calls of kernels QEMU answers."""
    paths = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "kernels_in_qemu"]
    command += [str(HERE / "test_quantized_product.py"), "--deselect", f"{HERE}/test_quantized_product.py::{NATIVE}"]
    environment = {**os.environ, "PYTHONPATH": paths, "ARM_FLAGS": flags, "ARM_SOURCES": "quantized.cc"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = re.search(r"^(\d+) calls of kernels on ARM$", done.stdout, re.M)
    assert found is not None and int(found[1]) > 100


NATIVE = "test_smaller_instruction_sets_give_the_same_products"
"""It builds kernels for this processor."""
