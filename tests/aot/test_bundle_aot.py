"""Bundles for accelerators that are not here: their kernels are in the programs, and their compilers take these."""

import importlib.util
import json

import jax
import numpy as np
import pytest
from jax import export

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import EngineOptions, serve
from torchax_serve.planning.topology import describe

ENGINE = EngineOptions(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32, kv_cache_memory_bytes=1 << 22)
COMPILERS = {"tpu": "libtpu", "cuda": "jax_plugins.xla_cuda13"}
CALLS = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu_v2"}


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module", params=["tpu:v6e", "cuda:h200"])
def exported(request, tmp_path_factory):
    platform = request.param.partition(":")[0]
    if not is_installed(COMPILERS[platform]):
        pytest.skip(f"{COMPILERS[platform]} is not installed, which describes the chip")
    with serve(EMBEDDED, dtype="bfloat16", pack_weights=False) as model:
        version = model.export(tmp_path_factory.mktemp("bundle"), platforms=[request.param], engine=ENGINE)
    (variant,) = json.loads((version / "manifest.json").read_text())["variants"].values()
    return request.param, version, variant


def test_the_kernels_are_in_the_programs(exported):
    target, version, variant = exported
    platform, _, chip = target.partition(":")
    assert (variant["platform"], variant["chip"]) == (platform, chip)
    for entry in variant["programs"].values():
        program = export.deserialize(bytearray((version / entry["file"]).read_bytes()))
        assert program.platforms == (platform,)
        assert program.nr_devices == 1
    called = {call for entry in variant["programs"].values() for call in entry["custom_calls"]}
    assert any(call.startswith(CALLS[platform][:6]) or "triton" in call for call in called), called


def test_the_chips_compiler_takes_a_program(exported):
    target, version, variant = exported
    chip, devices = describe({"v6e": "v6e:2x2", "h200": "h200:1"}[target.partition(":")[2]])
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("model",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    entry = next(each for each in variant["programs"].values() if "/decode_steps-" in each["file"])
    program = export.deserialize(bytearray((version / entry["file"]).read_bytes()))
    leaves = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place) for each in program.in_avals]
    args, _ = jax.tree.unflatten(program.in_tree, leaves)
    lowered = jax.jit(program.call).trace(*args).lower(lowering_platforms=(target.partition(":")[0],))
    assert lowered.compile().memory_analysis().argument_size_in_bytes > 0
    assert chip.name in target


def test_it_is_not_for_this_machine(exported):
    _, version, _ = exported
    with pytest.raises(UnsupportedModelError, match="export the model for it: --platform cpu"):
        serve(version)
