"""A new environment with a few packages and no PyTorch runs bundles, with the tokens of eager transformers.

Also one with another release of JAX than the one that made the bundle.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from exported import ENGINE, NUM_TOKENS, PROMPTS, eager_tokens

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import serve

ROOT = Path(__file__).parents[2]
PACKAGES = ("numpy", "safetensors", "tokenizers", "jinja2", "flatbuffers")
OTHER = "jax>=0.11,<0.12" if version("jax").startswith("0.10.") else "jax>=0.10,<0.11"
NEWER = "python3.12"
"""JAX 0.11 needs it; it runs the bundle where it is on the path."""
RUN = """
import json, sys
from torchax_serve import SamplingParams, serve
with serve(sys.argv[1]) as model:
    params = SamplingParams(max_new_tokens=int(sys.argv[3]), ignore_eos=True)
    found = [each.token_ids for each in model.generate_batch(json.loads(sys.argv[2]), params)]
import jax
names = {name.partition(".")[0] for name in sys.modules} & {"torch", "torchax", "transformers"}
print(json.dumps({"tokens": found, "imported": sorted(names), "jax": jax.__version__}))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    out = tmp_path_factory.mktemp("bundles") / "embedded"
    with serve(EMBEDDED, dtype="float32", engine=ENGINE, pack_weights=False) as model:
        model.export(out)
    return out


def interpreter(jax):
    """Returns the Python for a release of JAX: another one where this one is too old and that is there."""
    if ">=0.11" not in jax or sys.version_info >= (3, 12) or shutil.which(NEWER) is None:
        return sys.executable
    runs = subprocess.run(
        [NEWER, "-c", "import ensurepip"], capture_output=True, check=False
    )  # a shim may lead nowhere
    return sys.executable if runs.returncode else NEWER


@pytest.mark.parametrize("jax", [f"jax=={version('jax')}", OTHER])
def test_the_tokens_are_those_of_eager_transformers(bundle, jax, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([interpreter(jax), "-m", "venv", environment], check=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    variables |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    sources = tmp_path / "sources"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, sources, ignore=ignored)
    installed = subprocess.run([*pip, jax, *PACKAGES], env=variables, capture_output=True, text=True, check=False)
    if installed.returncode and jax == OTHER:
        pytest.skip(f"no {jax} for this Python: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    subprocess.run([*pip, "--no-deps", sources], env=variables, check=True)
    command = [environment / "bin" / "python", "-c", RUN, bundle, json.dumps(PROMPTS), str(NUM_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == eager_tokens(EMBEDDED)
    assert found["imported"] == []
    assert found["jax"].startswith(jax.partition("=")[2].lstrip("=").partition(",")[0])
