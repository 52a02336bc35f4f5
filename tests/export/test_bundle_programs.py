"""Plain JAX reads and calls each program of a bundle, without this project's reader."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from exported import ENGINE, PROMPTS, manifest_of
from jax import export
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from model_adapters.loading.model_source import EMBEDDED


@pytest.fixture(scope="module")
def tensors(bundle):
    found = load_file(bundle / "1" / "weights.safetensors")
    return {name: array for name, array in found.items() if not name.startswith(":padding:")}


@pytest.fixture(scope="module")
def kernels(bundle):
    """Registers the library of the bundle, as a user's own reader would."""
    native = manifest_of(bundle / "1")["native"]
    if native is None:
        return
    (path,) = native["libraries"].values()
    library = ctypes.CDLL(str(bundle / "1" / path))
    for target in native["targets"]:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")


def programs(bundle):
    for name, variant in manifest_of(bundle / "1")["variants"].items():
        for entry in variant["programs"].values():
            yield name, entry


def read(bundle, entry):
    return export.deserialize(bytearray((bundle / "1" / entry["file"]).read_bytes()))


def test_each_program_is_read_and_called(bundle, tensors, kernels):
    seen = set()
    for variant, entry in programs(bundle):
        program = read(bundle, entry)
        args = [jnp.zeros(each["shape"], each["dtype"]) for each in entry["arguments"]]
        results = program.call(tensors, *args)
        shapes = [(each.shape, each.dtype) for each in program.out_avals]
        assert [(each.shape, each.dtype) for each in results] == shapes
        assert bool(entry["custom_calls"]) == (variant == "cpu")
        assert entry["donated"] == ["pools"]
        seen.add((variant, entry["file"].rpartition("/")[2].partition("-")[0]))
    variants = {"cpu", "cpu-reference"} if manifest_of(bundle / "1")["native"] else {"cpu-reference"}
    assert seen == {(variant, kind) for variant in variants for kind in ("packed", "decode_steps")}


def test_the_logits_are_those_of_eager_pytorch(bundle, tensors, kernels):
    prompt = PROMPTS[2]
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt)])).logits[0, -1].numpy()
    num_tokens, num_rows = 32, ENGINE.max_num_seqs
    pages = -(-ENGINE.max_model_len // ENGINE.page_size)
    # As docs/bundles.md says: ids, slots, positions, bounds of rows, lengths, last tokens, table of pages.
    n, padding = len(prompt), num_tokens - len(prompt)
    table = np.zeros((num_rows, pages), np.int32)
    table[0, 0] = 1
    parts = [
        [*prompt, *[prompt[-1]] * padding],
        [0] * num_tokens,
        [*range(n), *[n - 1] * padding],
        [0, *[n] * num_rows],
        [n, *[0] * (num_rows - 1)],
        [n - 1] * num_rows,
        table.ravel(),
    ]
    numbers = np.concatenate(parts).astype(np.int32)
    compared = 0
    for _, entry in programs(bundle):
        shapes = {each["name"]: each["shape"] for each in entry["arguments"]}
        if "/packed-" not in entry["file"] or shapes["numbers"] != [len(numbers)] or "scored[0]" in shapes:
            continue
        given = {"numbers": numbers, "last_tokens": np.zeros(num_rows, np.int32)}
        args = [given.get(each["name"], np.zeros(each["shape"], each["dtype"])) for each in entry["arguments"]]
        found = read(bundle, entry).call(tensors, *args)[0]
        np.testing.assert_allclose(np.asarray(found)[0], logits, atol=1e-4)
        compared += 1
    assert compared == len(manifest_of(bundle / "1")["variants"])


def test_the_weights_are_those_of_the_checkpoint(tensors):
    checkpoint = load_file(EMBEDDED / "model.safetensors")
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, checkpoint[name].astype(np.float32))
