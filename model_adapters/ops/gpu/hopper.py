"""What the kernels for Hopper, through Pallas' Mosaic GPU lowering, support in common."""

from __future__ import annotations

import jax

from model_adapters.ops import registry
from model_adapters.ops.attention_args import AttentionArgs, unsupported_field

NAME = "gpu-mosaic"
# Platforms on which the kernels are selected before others; none as long as no hardware has confirmed all of them:
# until then they run only inside of `use`. Then ``("gpu",)``.
PLATFORMS: tuple[str, ...] = ()
DTYPES = ("bfloat16", "float16")
MAX_DIM = 256
DIM_MULTIPLE = 64  # the 128 bytes of a swizzle
PAGE_MULTIPLE = 8  # rows of a tile in shared memory
BLOCK_LEN = 64  # keys of the smallest block


SUPPORTED_ARGS = frozenset({"window", "softcap", "sinks"})
"""Fields of `AttentionArgs` that the kernels take."""


def unsupported_reason(
    q: jax.Array, v: jax.Array, pool: jax.Array, page_table: jax.Array, args: AttentionArgs
) -> str | None:
    """Returns why the kernels cannot take a call, or None.

    Arrays are ``q[T, Hq, D]``, ``v[T, H, Dv]``, the pool and the page table.
    """
    if registry.platform() != "gpu":
        return f"programs are traced for a {registry.platform()}; the kernel is for GPUs"
    if (reason := unsupported_field(args, SUPPORTED_ARGS)) is not None:
        return reason
    if str(q.dtype) not in DTYPES or pool.dtype != q.dtype:
        return f"q is {q.dtype} and pool {pool.dtype}; the kernel has bfloat16 over itself and float16 over itself"
    if 0 in q.shape or page_table.shape[0] == 0:
        return f"q{list(q.shape)}, {page_table.shape[0]} sequences: nothing to compute"
    page, dims = pool.shape[2], (q.shape[2], v.shape[2])
    if any(dim % DIM_MULTIPLE or not 0 < dim <= MAX_DIM for dim in dims):
        return f"keys of {dims[0]} and values of {dims[1]}; the kernel has multiples of {DIM_MULTIPLE} up to {MAX_DIM}"
    if page % PAGE_MULTIPLE or (BLOCK_LEN % page and page % BLOCK_LEN):
        return f"pages of {page} positions; the kernel has 8, 16, 32 and multiples of {BLOCK_LEN}"
    if pool.shape[3] % DIM_MULTIPLE:
        return f"rows of the pool have {pool.shape[3]} elements; the kernel needs a multiple of {DIM_MULTIPLE}"
    if jax.default_backend() == "gpu" and not str(jax.devices()[0].compute_capability).startswith("9."):
        return f"a GPU of compute capability {jax.devices()[0].compute_capability}; the kernel is for 9.0, Hopper"
    return None
