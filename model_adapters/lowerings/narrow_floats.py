"""Lowerings that compute float16 and bfloat16 in float32 and round once, as PyTorch does.

torchax 0.0.13 rounds every intermediate result to 16 bits: of a mean or a sum of many numbers few digits are left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import get_lowering, set_lowering
from model_adapters.ops.linear import HALF


def install() -> None:
    """Registers the lowerings in torchax's table, in place of torchax's own."""
    aten = torch.ops.aten
    for operator in (
        aten._log_softmax,
        aten.logaddexp,
        aten.logaddexp2,
        aten.glu,
        aten.exp2,
        aten.mvlgamma,
        aten.native_group_norm,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_no_training,
        aten.native_batch_norm,
        aten.avg_pool1d,
        aten.avg_pool2d,
        aten.avg_pool3d,
        aten._adaptive_avg_pool2d,
        aten._adaptive_avg_pool3d,
        aten.linalg_vector_norm,
    ):
        set_lowering(operator, in_float32(get_lowering(operator)), keep_kind=True)


def is_narrow(x: Any) -> bool:
    """Tells whether `x` is an array of 16-bit floats."""
    return isinstance(x, jax.Array) and x.dtype in HALF


def in_float32(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arrays that computes in float32 where its first operand has 16 bits.

    Results of float32 are rounded to the dtype of the first operand.
    """

    def computed(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        if not is_narrow(first):
            return theirs(*args, **kwargs)
        dtype = first.dtype  # type: ignore[union-attr]
        args, kwargs = jax.tree.map(lambda x: x.astype(jnp.float32) if is_narrow(x) else x, (args, kwargs))
        found = theirs(*args, **kwargs)
        return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, found)

    return computed
