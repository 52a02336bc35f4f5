"""Recurrent layers' GPU kernels compiled for an H200 and an H100, without one: in place, and no loop on the host.

Needs what `test_gpu_aot.py` does.
"""

import math
import re

import jax
import pytest
from gpu_compile import kernels, mesh, options, thunks
from jax.sharding import PartitionSpec
from recurrent_shapes import DeltaShape, SpaceShape, arguments

from model_adapters.ops import on_platform, registry, spmd

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

SHAPES = (
    DeltaShape(),
    DeltaShape(key_heads=16, heads=48, num_segments=1, num_tokens=1),  # one request of a hybrid of 27 billion weights
    DeltaShape(key_heads=30, heads=30, dim=96, width=192, num_segments=5, num_tokens=300),  # of OLMo hybrid
    DeltaShape(num_segments=1, num_tokens=2048),  # a prompt of Qwen3-Next
    DeltaShape(key_heads=32, heads=32, by_column=True),  # Kimi Linear's
    DeltaShape(key_heads=32, heads=32, by_column=True, num_segments=8, num_tokens=2048),
    DeltaShape(key_heads=2, heads=2, dim=256, width=256, by_column=True, num_segments=2, num_tokens=512),
    DeltaShape(key_heads=2, heads=4, dim=64, width=64, dtype="float32", num_segments=2, num_tokens=512),
    DeltaShape(key_heads=4, heads=4, dim=1024, width=64, dtype="float32", num_segments=8, num_tokens=8),
    SpaceShape(),
    SpaceShape(heads=24, dim=64, groups=1, states=256, num_segments=8, num_tokens=2048),  # of Falcon-H1
    SpaceShape(num_segments=64, num_tokens=2048),
    SpaceShape(heads=80, dim=64, groups=1, states=128, num_segments=1, num_tokens=1, dtype="float32"),
)


def compile_for_gpus(shape, folder, devices, pool_spec=PartitionSpec()):  # noqa: B008
    """The op on `shape` with its pool donated, and the implementations that were chosen."""
    with jax.set_mesh(devices), on_platform("gpu"), registry.record_calls() as record:
        call = jax.jit(shape.run, donate_argnums=1).trace(*arguments(shape, devices, pool_spec))
        compiled = call.lower(lowering_platforms=("cuda",)).compile(options(folder))
    return compiled, {name for _, name in record}


@pytest.mark.parametrize("gpu", ["h200", "h100"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_are_updated_in_place(shape, gpu, tmp_path):
    compiled, names = compile_for_gpus(shape, tmp_path, mesh(gpu))
    assert names == {"gpu-triton"}
    assert compiled.memory_analysis().alias_size_in_bytes == math.prod(shape.pool) * 4
    assert set(thunks(tmp_path)) == {"kCustomKernel"}  # no copy of the pool, and nothing that waits for the host
    found = kernels(tmp_path, rf"{shape.op}\w*")
    of_chunks = set()
    if shape.num_tokens > shape.num_segments and shape.op == "state_space":
        of_chunks = {f"{shape.op}_{each}" for each in ("pairs", "chunk")}
    elif shape.num_tokens > shape.num_segments and shape.dim <= 128:
        of_chunks = {f"{shape.op}_{each}" for each in ("pairs", "solve", "chunk")}
    assert set(found) == {shape.op} | of_chunks
    for kernel in found.values():
        assert kernel.spill_bytes == 0
    assert found[shape.op].grid[:2] == (shape.num_segments, shape.heads)
    assert "st.global.v4.b32" in found[shape.op].instructions  # 16 bytes at a time
    for name in of_chunks:
        assert any(re.match(r"(wg)?mma\..*bf16", each) for each in found[name].instructions)
        assert found[name].shared_bytes <= 99 << 10  # of the least of GPUs with tensor cores for bfloat16


@pytest.mark.parametrize("shape", [DeltaShape(num_tokens=512), SpaceShape(num_tokens=512)], ids=str)
def test_a_mesh_divides_heads(shape, tmp_path):
    devices = mesh("h200", 2)
    with spmd.on_mesh(devices):
        compiled, names = compile_for_gpus(shape, tmp_path, devices, PartitionSpec(None, "model"))
    assert names == {"sharded-kernel", "gpu-triton"}
    assert compiled.memory_analysis().alias_size_in_bytes == math.prod(shape.pool) * 4 // 2
    found = kernels(tmp_path, rf"{shape.op}\w*").values()
    assert found and all(kernel.grid[1] == shape.heads // 2 for kernel in found)
    assert not {"all-gather", "all-reduce", "collective-permute"} & set(compiled.as_text().split("("))
