"""Checkpoints of and for the formats' own tools; collected only where the folder is named.

These libraries are large, and transformers takes other paths where it finds them installed: ``pip install --no-deps
--target .venv/format-tools bitsandbytes torchao hqq einops termcolor autoawq auto-gptq``, then
``PYTHONPATH=.venv/format-tools pytest -n 0 tests/format_tools``. What else is not installed is skipped: the files of
FBGEMM, GPTQModel and vLLM say what they need, each in a folder of its own.

llama.cpp is compiled by ``python benchmarks/peers.py install environments llama-cpp`` (15 minutes on two cores), and
``pytest -n 0 tests/format_tools/test_llama_cpp.py --llama-cpp environments/llama-cpp`` runs its tests.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "loading" / "formats"))


def pytest_addoption(parser):
    for tool in ("llama-cpp", "vllm"):
        parser.addoption(f"--{tool}", metavar="FOLDER", type=Path, help=f"{tool} as peers.py has installed it")


def _installed(pytestconfig, tool):
    """Returns the folder that the command line names for a tool; skips the tests of one that it does not name."""
    if (folder := pytestconfig.getoption(f"--{tool}")) is None:
        pytest.skip(f"python benchmarks/peers.py install environments {tool}; --{tool} environments/{tool}")
    return folder.resolve()


@pytest.fixture(scope="session")
def llama_cpp(pytestconfig):
    """llama.cpp; without it its tests are skipped."""
    from llama_cpp import Tool

    return Tool(_installed(pytestconfig, "llama-cpp"))


@pytest.fixture(scope="session")
def vllm(pytestconfig):
    """The folder of vLLM's packages; without it its tests are skipped."""
    return _installed(pytestconfig, "vllm")
