"""Calls of the paged ops, and their compilation for TPU chips that need not be there (libtpu is all it takes)."""

import functools
import importlib.util
import os
from dataclasses import dataclass, field

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")  # asked for at load time, whatever is compiled for
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import model_adapters.ops.tpu  # noqa: F401 registers the kernels
from model_adapters.ops import AttentionArgs, KVScales, decode_attention, on_platform, paged_attention, use


@dataclass(frozen=True)
class Chip:
    """One core as a program sees it."""

    topology: str
    clock_ghz: float  # inferred from published peak rates
    hbm_gb_per_s: float  # published; of tpu7x the half that belongs to one of its two cores


IN_8_BITS = ("int8", "float8_e4m3fn")  # pools that have scales
CHIPS = {
    "v5e": Chip("v5e:2x2", 1.5, 820),
    "v6e": Chip("v6e:2x2", 1.75, 1640),
    "tpu7x": Chip("tpu7x:2x2x1", 2.2, 3700),
}


@dataclass(frozen=True)
class Shape:
    """One call: kv heads, query heads per kv head, head sizes, page, dtypes, and features."""

    heads: int = 8
    group: int = 4
    dim: int = 128
    value_dim: int | None = None
    page: int = 64
    dtype: str = "bfloat16"
    pool_dtype: str | None = None
    rows: int = 32
    num_tokens: int = 512  # of a ragged call
    capacity: int = 4096
    num_pages: int = 2049
    sinks: bool = False
    alibi: bool = False
    prefix: bool = False
    images: bool = False
    options: dict = field(default_factory=dict)

    def __str__(self):
        features = [name for name in ("sinks", "alibi", "prefix", "images") if getattr(self, name)] + list(self.options)
        sizes = f"{self.heads}x{self.group} heads of {self.dim}" + (f"/{self.value_dim}" if self.value_dim else "")
        dtypes = self.dtype + (f" over {self.pool_dtype}" if self.pool_dtype else "")
        return " ".join([sizes, f"page {self.page}", dtypes, *features])

    @property
    def width(self):
        """Length of a pool's rows."""
        used = self.dim + (0 if "value_begin" in self.options else self.value_dim or self.dim)
        return used + -used % 128

    @property
    def pool(self):
        dtype = jnp.dtype(self.pool_dtype or self.dtype)
        return jax.ShapeDtypeStruct((self.num_pages, self.heads, self.page, self.width), dtype)


@functools.cache
def mesh_of(chip):
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(
            "expected libtpu, the TPU compiler, got none; run `pip install libtpu` (0.0.42 for jax 0.10.2)"
        )
    devices = topologies.get_topology_desc(CHIPS[chip].topology, platform="tpu").devices
    return Mesh(np.array(devices)[:1], ("model",))


def compile_call(op, shape, chip):
    """`op` on `shape`, compiled for one core of `chip` with its pool donated."""
    mesh = mesh_of(chip)

    def array(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    rows, query_heads = shape.rows, shape.heads * shape.group
    tokens = rows if op == "decode_attention" else shape.num_tokens
    ints = array(jnp.int32, rows)
    by_query_head, by_head = array(jnp.float32, query_heads), array(jnp.float32, shape.heads)
    features = AttentionArgs(
        shape.dim**-0.5,
        sinks=by_query_head if shape.sinks else None,
        alibi_slopes=by_query_head if shape.alibi else None,
        prefix_lens=ints if shape.prefix else None,
        sees_until=array(jnp.int32, tokens) if shape.images else None,
        kv_scales=KVScales(by_head, by_head) if shape.pool_dtype in IN_8_BITS else None,
        **shape.options,
    )
    args = (
        array(shape.dtype, tokens, query_heads, shape.dim),
        array(shape.dtype, tokens, shape.heads, shape.dim),
        array(shape.dtype, tokens, shape.heads, shape.value_dim or shape.dim),
        array(shape.pool.dtype, *shape.pool.shape),
        array(jnp.int32, rows, shape.capacity // shape.page),
        ints,
        ints if op == "decode_attention" else array(jnp.int32, rows + 1),
        features,
    )
    function = decode_attention if op == "decode_attention" else paged_attention

    def call(*args):
        return function(*args)

    with jax.set_mesh(mesh), on_platform("tpu"), use(op, "tpu-pallas"):
        return jax.jit(call, donate_argnums=3).trace(*args).lower().compile()
