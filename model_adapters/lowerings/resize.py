"""Resampling of images, which models apply to positions learned for another size.

Each method is linear in the pixels and works on rows and columns separately, so it is two products with matrices. The
matrices are what torch makes of the unit vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import get_lowering, set_lowering
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings.narrow_floats import in_float32

SMOOTHED = (torch.ops.aten._upsample_bicubic2d_aa, torch.ops.aten._upsample_bilinear2d_aa)
"""Operators of ``interpolate(…, antialias=True)``.

torchax 0.0.13 calls a function of JAX that is no longer a function.
"""


def install() -> None:
    """Registers the lowerings in torchax's table."""
    for operator in SMOOTHED:
        set_lowering(operator, functools.partial(_resampled, operator.default))
        set_lowering(operator.default, functools.partial(_resampled, operator.default))
    interpolate: Any = torch.nn.functional.interpolate
    set_lowering(interpolate, _checked(get_lowering(interpolate)), keep_kind=True)


def _checked(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of ``interpolate``, in float32 for 16-bit floats."""

    def interpolate(x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mode", args[2] if len(args) > 2 else "nearest") in ("bilinear", "bicubic"):
            _check_floats(x)
        return in_float32(theirs)(x, *args, **kwargs)

    return interpolate


def _check_floats(x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UnsupportedModelError(
            f"interpolate: expected floats, got {x.dtype}, whose weights PyTorch rounds, too; convert by .float()"
        )


def _resampled(
    operator: Callable[..., torch.Tensor],
    x: jax.Array,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scales_h: float | Sequence[float] | None = None,
    scales_w: float | None = None,
    scale_factors: Sequence[float] | None = None,
) -> jax.Array:
    """Returns `x` [batch, channels, height, width] in another size, as `operator` has it."""
    _check_floats(x)
    if isinstance(scales_h, Sequence):
        scales_h, scale_factors = None, scales_h
    if scale_factors is not None:
        scales_h, scales_w = scale_factors
        output_size = [int(length * factor) for length, factor in zip(x.shape[2:], scale_factors, strict=True)]
    assert output_size is not None  # PyTorch wants one of both
    rows = _matrix(operator, x.shape[2], output_size[0], align_corners, scales_h)
    columns = _matrix(operator, x.shape[3], output_size[1], align_corners, scales_w)
    exact: Any = jax.lax.Precision.HIGHEST
    return jnp.einsum("bchw,Hh,Ww->bcHW", x, rows, columns, precision=exact).astype(x.dtype)


@functools.lru_cache(maxsize=64)
def _matrix(
    operator: Callable[..., torch.Tensor], size: int, wanted: int, align_corners: bool, scale: float | None
) -> np.ndarray:
    """Returns float32[wanted, size]: a column of pixels in another size."""
    with torch.utils._python_dispatch._disable_current_modes():
        units = torch.eye(size)[None, None]  # a column for each; along the rows nothing changes
        return operator(units, [wanted, size], align_corners, scale, None)[0, 0].numpy().copy()
