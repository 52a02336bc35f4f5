"""Activations that the backward pass computes again, layer by layer (rematerialization; Chen et al., 2016).

The boundary is the function that `model_adapters.program.shared_layers` makes of a kind of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def layer_transform(remat: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what is applied to the function of each layer: `jax.checkpoint`, or nothing."""
    if not remat:
        return lambda function: function
    return checkpointed


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` whose backward pass computes it again from its arguments."""
    return jax.checkpoint(function)
