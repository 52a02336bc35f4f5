"""What the tests of bundles share: a process that may not import PyTorch, and eager transformers beside it."""

import json
import os
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM

from torchax_serve import EngineOptions

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
