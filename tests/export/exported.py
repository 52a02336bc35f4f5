"""What the tests of bundles share: a process that may not import PyTorch, and eager transformers beside it."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import EngineOptions
from torchax_serve.export.manifest import write_manifest
from torchax_serve.start.weights_file import file_of

ENGINE = EngineOptions(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, max_num_steps=4)
PROMPTS = ([5, 6, 7], [11] * 20, [300, 2, 40, 41, 42, 43, 99])
NUM_TOKENS = 12

# Importing what a bundle needs not raises, also packages that only the command line needs.
REFUSAL = """
import sys
class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "torchax", *REFUSED):
            raise AssertionError(f"{name} is imported")
REFUSED = sys.argv.pop(1).split(",")
sys.meta_path.insert(0, Refusal())
"""
FEW = "psutil,huggingface_hub,accelerate,typer,rich,prompt_toolkit,safetensors"
"""Packages that an environment with jax, tokenizers and jinja2 alone has not."""


def output_of(script, *arguments, refused="", **environment):
    """What a new process prints in which importing PyTorch, transformers and the `refused` packages raises."""
    done = run(script, *arguments, refused=refused, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(script, *arguments, refused="", **environment):
    """As `output_of`, whatever becomes of the process; with `refused` None it may import everything."""
    head = ["import sys\n" + script] if refused is None else [REFUSAL + script, refused]
    command = [sys.executable, "-c", *head, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
    )


def eager_tokens(folder, prompts=PROMPTS, num_tokens=NUM_TOKENS):
    """The tokens that eager transformers appends to each prompt, greedily and through the end of the sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            for _ in range(num_tokens):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def manifest_of(version):
    return json.loads((version / "manifest.json").read_text())


def with_other_weights(folder, number):
    """Adds a version to a bundle of the embedded model; returns a folder with its weights for eager transformers."""
    checkpoint = folder.parent / f"model-{number}"
    shutil.copytree(EMBEDDED, checkpoint)
    arrays = {name: changed(name, each) for name, each in load_file(EMBEDDED / "model.safetensors").items()}
    save_file(arrays, checkpoint / "model.safetensors", {"format": "pt"})
    partial = folder / ".partial-new"
    shutil.copytree(folder / "1", partial)
    tensors = {name: changed(name, each) if name in arrays else each for name, each in weights_of(folder / "1").items()}
    (partial / "weights.safetensors").write_bytes(b"".join(file_of(tensors)[1]))
    content = manifest_of(partial)
    for name in ("format", "format_version", "files", "digest"):
        del content[name]
    write_manifest(partial, content)
    partial.rename(folder / str(number))
    return checkpoint


def changed(name, array):
    array = array.astype(np.float32)
    noise = np.random.default_rng(len(name)).standard_normal(array.shape).astype(np.float32)
    return array + np.float32(0.3) * array.std() * noise


def weights_of(version):
    found = load_file(version / "weights.safetensors")
    return {name: array for name, array in found.items() if not name.startswith(":padding:")}
