"""A package that is missing is said, with the extra that brings it, before PyTorch and JAX are imported."""

import json
import subprocess
import sys

import pytest

COMMANDS = {
    "run {gguf} Hello": ("gguf", "pip install gguf"),
    "bench {gguf}": ("gguf", "pip install gguf"),
    "quantize {gguf} out --quantization int8": ("gguf", "pip install gguf"),
    "run Hello --image cat.png": ("pillow", "torchax-serve[images]"),
    "serve": ("starlette", "torchax-serve[server]"),
    "batch {file} {file}.out --model {model}": ("starlette", "torchax-serve[server]"),
    "draw {file} fox --output fox.png": ("diffusers", "torchax-serve[diffusion]"),
    "export {model} out": ("flatbuffers", "torchax-serve[export]"),
    "deploy": ("ray", "torchax-serve[ray]"),
    "bench --plot bench.png": ("matplotlib", "torchax-serve[plot]"),
    "profile --plot profile.png": ("matplotlib", "torchax-serve[plot]"),
    "train {model} --data {file} --out out": ("optax", "torchax-serve[train]"),
    "plan --topology v6e:2x4": ("libtpu", "torchax-serve[plan]"),
    "plan --topology h200:8": ("JAX's plug-in for CUDA", "torchax-serve[cuda]"),
}
"""Command lines, the package that is named, and what to install."""
PROGRAM = """
import importlib.util, json, sys
from typer.testing import CliRunner

HIDDEN = {"gguf", "PIL", "starlette", "diffusers", "flatbuffers", "ray", "matplotlib", "optax", "libtpu", "jax_plugins"}
find_spec = importlib.util.find_spec

def found(name, package=None):
    if name.partition(".")[0] in HIDDEN:
        if "." in name:
            raise ModuleNotFoundError(name)
        return None
    return find_spec(name, package)

importlib.util.find_spec = found
from torchax_serve.cli.main import app

said = {}
for line in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, line.split())
    said[line] = [done.exit_code, done.stderr, sorted({"torch", "jax", "transformers"} & set(sys.modules))]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each command says in a process in which none of the packages can be found."""
    folder = tmp_path_factory.mktemp("extras")
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    (folder / "file.jsonl").write_text("{}\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model" / "model.safetensors").write_bytes(bytes(8))
    names = {"gguf": folder / "model.gguf", "file": folder / "file.jsonl", "model": folder / "model"}
    lines = {line: line.format(**names) for line in COMMANDS}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(list(lines.values()))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {line: found[written] for line, written in lines.items()}


@pytest.mark.parametrize("line", COMMANDS)
def test_the_extra_is_named_before_anything_heavy_is_imported(said, line):
    status, message, imported = said[line]
    package, remedy = COMMANDS[line]
    assert (status, imported) == (2, []), message
    assert message.startswith("error: ") and message.count("\n") == 1
    assert f"expected the package {package}" in message or f"expected {package}" in message
    assert remedy in message
