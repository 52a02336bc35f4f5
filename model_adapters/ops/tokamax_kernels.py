"""Tokamax's kernels as implementations of ops (https://github.com/openxla/tokamax).

Of its ops `ragged_dot` is one of ours, products of groups of rows.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.grouped_matmul import OP, Layout, zero_after
from model_adapters.ops.linear import accumulator, precision

NAME = "tokamax"
MIN_SIZE = 128
"""Inner size and columns of the smallest product of its kernels for TPUs; rows are a multiple of it."""
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}
"""Platform of the registry by JAX's backend, where they differ."""


def _unsupported_reason(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed; pip install 'torchax-serve[tokamax]'"
    here, backend = registry.platform(), jax.default_backend()
    if here != _PLATFORMS.get(backend, backend):
        return f"Tokamax chooses a kernel by the devices in use, which are those of {backend}; this is for {here}"
    inner, columns = weight.shape[1:] if layout == "ekn" else weight.shape[:0:-1]
    if here == "tpu" and (x.shape[0] % MIN_SIZE or min(inner, columns) < MIN_SIZE):
        return (
            f"Tokamax's kernel takes a multiple of {MIN_SIZE} rows, and weights of {MIN_SIZE} rows and columns or more"
        )
    if here == "tpu" and x.dtype == jnp.float16:
        return "Tokamax's kernel takes no float16"
    return None


@registry.register(OP, NAME, (), unsupported_reason=_unsupported_reason)
def ragged_dot(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> jax.Array:
    """Computes with Tokamax's kernel for the platform; on a CPU that is XLA's product."""
    import tokamax
    from absl import flags

    if not flags.FLAGS.is_parsed():  # it would read the command line, which is this program's
        flags.FLAGS.mark_as_parsed()
    if layout == "enk":
        weight = jnp.swapaxes(weight, 1, 2)
    sums = tokamax.ragged_dot(
        x,
        weight,
        group_sizes.astype(jnp.int32),
        precision=precision(x.dtype),
        preferred_element_type=accumulator(x.dtype),
        implementation="xla" if registry.platform() == "cpu" else "mosaic",
    )
    return zero_after(sums, group_sizes).astype(x.dtype)
