"""Plain JAX reads and calls each program of a bundle, in a process that may not import anything of this project."""

import json

import numpy as np
import torch
from exported import ENGINE, PROMPTS, manifest_of, output_of
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from model_adapters.loading.model_source import EMBEDDED

PACKAGES = "torchax_serve,model_adapters,pytree_registry,sharding_rules"
PROMPT = PROMPTS[2]
NUM_TOKENS, PAGES = 32, -(-ENGINE.max_model_len // ENGINE.page_size)

# Calls every program, with zeros where the test gives nothing; prints shapes, and the logits of the given step.
SCRIPT = """
import ctypes, json
from pathlib import Path
import jax, numpy as np
from jax import export
from safetensors.numpy import load_file
version, numbers = Path(sys.argv[1]), np.array(json.loads(sys.argv[2]), np.int32)
manifest = json.loads((version / "manifest.json").read_text())
tensors = load_file(version / "weights.safetensors")
tensors = {name: array for name, array in tensors.items() if not name.startswith(":padding:")}
if manifest["native"]:
    (path,) = manifest["native"]["libraries"].values()
    library = ctypes.CDLL(str(version / path))
    for target in manifest["native"]["targets"]:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
found = []
for name, variant in manifest["variants"].items():
    for key, entry in variant["programs"].items():
        program = export.deserialize(bytearray((version / entry["file"]).read_bytes()))
        shapes = {each["name"]: each["shape"] for each in entry["arguments"]}
        is_given = key.startswith("packed") and "scored[0]" not in shapes
        given = {"numbers": numbers} if is_given else {}
        args = [given.get(each["name"], np.zeros(each["shape"], each["dtype"])) for each in entry["arguments"]]
        results = program.call(tensors, *args)
        assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in program.out_avals]
        logits = np.asarray(results[0])[0].tolist() if is_given else None
        found.append([name, key.partition("-")[0], entry["custom_calls"], entry["donated"], logits])
print(json.dumps(found))
"""


def step():
    """The step of one prompt, as docs/bundles.md says."""
    n, padding, num_rows = len(PROMPT), NUM_TOKENS - len(PROMPT), ENGINE.max_num_seqs
    table = np.zeros((num_rows, PAGES), int)
    table[0, 0] = 1
    tables = [table.ravel()] * 2  # the model has layers with a sliding window and others
    ids, slots, positions = [*PROMPT, *[PROMPT[-1]] * padding], [0] * NUM_TOKENS, [*range(n), *[n - 1] * padding]
    bounds, lens, last = [0, *[n] * num_rows], [n, *[0] * (num_rows - 1)], [n - 1] * num_rows
    return np.concatenate([ids, slots, positions, bounds, lens, last, *tables]).tolist()


def test_each_program_is_read_and_called_and_has_the_logits_of_eager_pytorch(bundle):
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([list(PROMPT)])).logits[0, -1].numpy()
    found = json.loads(output_of(SCRIPT, bundle / "1", json.dumps(step()), refused=PACKAGES))
    has_kernels = manifest_of(bundle / "1")["native"] is not None
    variants = {"cpu", "cpu-reference"} if has_kernels else {"cpu-reference"}
    assert {(variant, kind) for variant, kind, *_ in found} == {
        (variant, kind) for variant in variants for kind in ("packed", "decode_steps")
    }
    compared = 0
    for variant, _, custom_calls, donated, logits in found:
        assert bool(custom_calls) == (variant == "cpu")
        assert donated == ["pools"]
        if logits is not None:
            np.testing.assert_allclose(logits, expected, atol=1e-4)
            compared += 1
    assert compared == len(variants)


def test_the_weights_are_those_of_the_checkpoint(bundle):
    stored, checkpoint = load_file(bundle / "1" / "weights.safetensors"), load_file(EMBEDDED / "model.safetensors")
    stored = {name: array for name, array in stored.items() if not name.startswith(":padding:")}
    assert len(stored) >= len(checkpoint)
    for name, array in checkpoint.items():
        np.testing.assert_array_equal(stored[name], array.astype(np.float32))
