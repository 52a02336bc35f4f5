"""The GPU kernels compiled for an H200 and an H100, without one: no spills, no copy of the pool, no loop on the host.

Needs XLA's plug-in for CUDA and NVIDIA's compilers, which ``gpu_compile.NEEDED`` names.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from gpu_compile import Shape, compile_call, kernels, mesh, options
from jax.sharding import NamedSharding, PartitionSpec

from model_adapters.ops import grouped_matmul, on_platform
from model_adapters.ops.gpu.split_kv import num_splits

# From jax 0.11 on; that the lowering is still there is what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

SLACK_BYTES = 64 << 10  # tables of items and positions, and XLA's alignment
SHARED_BYTES = 99 << 10  # what a program may have on the least of GPUs with tensor cores for bfloat16
DTYPES = (
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("float32", "float32"),
)
DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 2, 4, 8, 16)
PAGES = (16, 32, 64)
FEATURES = (
    {},
    {"window": 128, "sinks": True},
    {"softcap": 30.0},
    {"alibi": True},
    {"sinks": True},
)
# Every dtype with every dim; groups, pages and features go round.
GRID = tuple(
    Shape(
        dim=dim,
        dtype=dtype,
        pool_dtype=pool_dtype,
        group=GROUPS[(i + j) % len(GROUPS)],
        page=PAGES[(i + 2 * j) % len(PAGES)],
        heads=2 if (i + j) % 2 else 8,
        **FEATURES[(2 * i + j) % len(FEATURES)],
    )
    for i, dim in enumerate(DIMS)
    for j, (dtype, pool_dtype) in enumerate(DTYPES)
)
MORE = (
    Shape(dim=576, value_dim=512, group=16, heads=1, value_begin=0),  # latent attention
    Shape(dim=192, value_dim=128, group=1, heads=16),
    Shape(dim=512, group=8),
    Shape(dim=512, group=2, pool_dtype="int8"),
    Shape(dim=64, group=71, heads=1),
    Shape(dim=256, group=128, heads=1),
    Shape(dim=128, group=7, heads=4),
    Shape(dim=64, group=64, heads=1, dtype="float32", pool_dtype="bfloat16"),
    Shape(dim=128, group=32, heads=1, dtype="float32", pool_dtype="int8"),
    Shape(dim=64, group=64, heads=1, dtype="float32", pool_dtype="float32"),
    Shape(num_seqs=256, num_pages=8192),
    Shape(page=4096, num_pages=8),  # a cache with one page per row
    Shape(num_pages=9000),  # more than 4 GiB
)


IMAGES = (Shape(dim=256, group=2, heads=4, images=True), Shape(dim=256, group=2, heads=4, images=True, window=1024))


def check(report, shape, num_rows):
    assert {kernel.spill_bytes for kernel in report.kernels.values()} == {0}
    assert report.alias_bytes == report.pool_bytes
    assert set(report.thunks) == {"kCustomKernel"}  # no copy, and no loop that waits for the host
    splits = report.kernels[("paged" if shape.num_tokens else "decode") + "_attention"].grid[2]
    partial_bytes = splits * num_rows * shape.heads * shape.group * ((shape.value_dim or shape.dim) + 1) * 4
    assert report.temp_bytes <= SLACK_BYTES + (partial_bytes if splits > 1 else 0)


@pytest.mark.parametrize("shape", [*GRID, *MORE], ids=str)
def test_decode(shape, tmp_path):
    report = compile_call(shape, tmp_path)
    check(report, shape, shape.num_seqs)
    kernel = report.kernels["decode_attention"]
    copies = {name for name in kernel.instructions if name.startswith("cp.async.c")}
    assert copies  # past the registers, while something else is computed with
    if shape.pool_dtype in (None, shape.dtype):
        assert "cp.async.cg.shared.global" in copies  # 16 bytes at a time
    if (shape.dtype, shape.pool_dtype) != ("float32", "float32"):
        assert any(name.startswith(("wgmma", "mma.sync")) for name in kernel.instructions)
    if shape in GRID:
        assert kernel.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("shape", [*GRID[::2], *MORE, *IMAGES], ids=str)
def test_ragged(shape, tmp_path):
    shape = dataclasses.replace(shape, num_tokens=512, prefix=shape.sinks)
    report = compile_call(shape, tmp_path)
    check(report, shape, shape.num_tokens)
    kernel = report.kernels["paged_attention"]
    if (shape.dtype, shape.pool_dtype) != ("float32", "float32"):
        assert any(name.startswith(("wgmma", "mma.sync")) for name in kernel.instructions)
    if shape in GRID:
        assert kernel.shared_bytes <= SHARED_BYTES


OF_8_BITS = [
    Shape(dim=dim, group=group, pool_dtype=dtype, window=window)
    for dtype in ("int8", "float8_e4m3fn")
    for dim, group, window in ((64, 4, None), (128, 8, None), (256, 2, 512))
]


@pytest.mark.parametrize("shape", OF_8_BITS, ids=str)
@pytest.mark.parametrize("num_tokens", [None, 512])
def test_pages_in_8_bits_on_an_h100(shape, num_tokens, tmp_path):
    shape = dataclasses.replace(shape, num_tokens=num_tokens)
    report = compile_call(shape, tmp_path, gpu="h100")
    check(report, shape, num_tokens or shape.num_seqs)
    kernel = report.kernels["paged_attention" if num_tokens else "decode_attention"]
    assert any(name.startswith(("wgmma", "mma.sync")) for name in kernel.instructions)


def test_prefill_uses_the_products_of_whole_warp_groups(tmp_path):
    report = compile_call(Shape(num_tokens=2048), tmp_path)
    assert any(name.startswith("wgmma") for name in report.kernels["paged_attention"].instructions)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize(
    ("rows", "weight", "layout"),
    [
        (64, (128, 1536, 2048), "enk"),
        (16384, (128, 1536, 2048), "enk"),
        (16384, (128, 2048, 768), "enk"),
        (64, (32, 2880, 5760), "ekn"),
    ],
)
def test_experts(rows, weight, layout, gpu, tmp_path):
    """Nothing is copied, and products of many rows are those of warp groups."""
    sharding = NamedSharding(mesh(gpu), PartitionSpec())
    shapes = (rows, weight[1 if layout == "ekn" else 2]), weight
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    sizes = jax.ShapeDtypeStruct(weight[:1], jnp.int32, sharding=sharding)
    with on_platform("gpu"):
        traced = jax.jit(functools.partial(grouped_matmul, layout=layout)).trace(*given, sizes)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile(options(tmp_path))
    assert compiled.memory_analysis().temp_size_in_bytes < 1e5
    kernel = kernels(tmp_path, "grouped_matmul")["grouped_matmul"]
    assert kernel.spill_bytes == 0 and kernel.shared_bytes <= SHARED_BYTES
    assert "cp.async.cg.shared.global" in kernel.instructions
    product = "wgmma" if rows > 1000 else "mma.sync"
    assert any(name.startswith(product) for name in kernel.instructions)


MOSAIC = (
    Shape(),
    Shape(dim=64, page=16, sinks=True),
    Shape(dim=64, group=8, heads=2, page=32, softcap=30.0),
    Shape(dim=192, value_dim=128, group=1, window=512),
    Shape(dim=128, group=16, dtype="float16"),
    Shape(dim=128, group=64, heads=1),
    Shape(page=4096, num_pages=8),
)


@pytest.mark.parametrize("shape", MOSAIC, ids=str)
def test_mosaic_decode(shape, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    report = compile_call(shape, tmp_path, "gpu-mosaic")
    said = "".join(capfd.readouterr())
    assert "decode_attention_mosaic" in said
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert report.alias_bytes == report.pool_bytes
    assert set(report.thunks) == {"kCustomKernel", "kCustomCall"}
    num_rows, value_dim = shape.group + -shape.group % 8, shape.value_dim or shape.dim
    splits = num_splits(shape.num_seqs * shape.heads, shape.window or shape.capacity)
    partial_bytes = splits * (num_rows * value_dim + 2 * 64) * 4  # with logarithms and weights
    query_bytes = num_rows * shape.dim * 2
    assert report.temp_bytes <= SLACK_BYTES + shape.num_seqs * shape.heads * (partial_bytes + query_bytes)


MOSAIC_RUNS = (
    Shape(num_tokens=2048, num_seqs=1),
    Shape(num_tokens=512, dim=64, page=16, sinks=True),
    Shape(num_tokens=512, dim=192, value_dim=128, group=1, window=512),
    Shape(num_tokens=512, dtype="float16", page=4096, num_pages=8),
)
FEW_BYTES = 32  # of spills: ptxas cannot place a few scalars of the largest kernels, next to 180 registers of sums


@pytest.mark.parametrize("shape", MOSAIC_RUNS, ids=str)
def test_mosaic_prefill(shape, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    report = compile_call(shape, tmp_path, "gpu-mosaic")
    (spilled,) = re.findall(r"(\d+) bytes spill stores, \d+ bytes spill loads\n", "".join(capfd.readouterr()))[-1:]
    assert int(spilled) <= FEW_BYTES
    assert report.alias_bytes == report.pool_bytes
    assert set(report.thunks) == {"kCustomKernel", "kCustomCall"}
    assert report.temp_bytes <= SLACK_BYTES
