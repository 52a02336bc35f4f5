"""The command line with a real model: one piped answer, its memory, and the start with and without kept programs."""

import json
import os
import re
import subprocess
import sys

import pytest
from fetch import folder_of

QUESTION = "What is the capital of France?"
MAX_BYTES = 2.0e9
"""Weights of 270 MB, PyTorch, JAX and a compiler: 1.45 to 1.62 GB, by how many threads the machine gives the compiler.

A cache sized for a server would be 5 GB more.
"""

# The program; at its end it says the most memory it has had (the kernel's own count, of this program alone).
RUN = """
import sys
from torchax_serve.cli.main import main
try:
    main()
finally:
    with open("/proc/self/status") as status:
        sys.stderr.write("".join(line for line in status if line.startswith("VmHWM")))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """Runs ``torchax-serve run`` on a piped question; the object it prints, and the most memory it took in bytes."""
    programs = tmp_path_factory.mktemp("programs")

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-c", RUN, "run", str(folder_of("smollm2")), "--json", *arguments],
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(programs), "XLA_FLAGS": ""},  # compiled as served
            input=QUESTION,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), 1024 * int(re.search(r"^VmHWM:\s+(\d+) kB", done.stderr, re.M)[1])

    return run


def test_a_piped_answer_cold_and_warm(answer, found):
    options = ("--max-new-tokens", "24", "--dtype", "float32")
    cold, cold_bytes = answer(*options)
    warm, warm_bytes = answer(*options)
    assert cold["text"] == warm["text"] == "The capital of France is Paris."
    assert warm["stats"]["ttft_s"] < cold["stats"]["ttft_s"] / 2
    found("smollm2", "`run`, first token of a cold start, of a second start", _seconds(cold, warm))
    assert max(cold_bytes, warm_bytes) < MAX_BYTES + 270e6  # float32 weights


def test_memory_of_a_piped_answer(answer, found):
    _, cold_bytes = answer("--max-new-tokens", "24")
    told, warm_bytes = answer("--max-new-tokens", "24")
    assert told["text"]
    assert max(cold_bytes, warm_bytes) < MAX_BYTES
    found(
        "smollm2",
        "`run` in bfloat16, peak memory of a cold start, of a second start",
        f"{cold_bytes / 1e9:.2f} GB, {warm_bytes / 1e9:.2f} GB",
    )


def _seconds(*answers):
    return ", ".join(f"{each['stats']['ttft_s']:.1f} s" for each in answers)
