"""Checks that need eight devices, by one process that has them."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("mesh_checks.py")
ROOT = CHECKS.parents[2]
TIMEOUT_S = 900
DONE, FAILED = "== done", "== failed"  # the last line of a call


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    """Runs a function of `mesh_checks.py`; the lines it prints. All calls of a file run in one process."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "benchmarks", ROOT / "tests", ROOT / "tests/engine"])),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    errors = tmp_path_factory.mktemp("eight") / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(CHECKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )

    def run(*call):
        too_long = threading.Timer(TIMEOUT_S, process.kill)
        too_long.start()
        process.stdin.write(json.dumps(call) + "\n")
        process.stdin.flush()
        lines, end = [], None
        for line in process.stdout:
            if (end := line.rstrip("\n")) in (DONE, FAILED):
                break
            lines.append(end)
        too_long.cancel()
        assert end == DONE, errors.read_text()[-3000:]
        return lines

    yield run
    with process:
        process.stdin.close()
