"""Rematerialization: the backward pass recomputes layers (Chen et al., 2016).

The boundary is the function that `model_adapters.program.shared_layers` makes of a kind of layers.

`jax.checkpoint` puts an optimization barrier between the layer's inputs and their second use, so that a layer is not
computed again before its gradient is due. XLA's compiler for CPUs removes barriers before it schedules: layers are
computed twice and all stored. There a condition that XLA cannot evaluate takes its place, as in JAX before it had
barriers: what is inside is computed when its operands are there, and its buffers are free again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry


def layer_transform(remat: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what is applied to each layer's function.

    It is a function that stores its inputs only, or nothing.
    """
    if not remat:
        return lambda function: function
    return _conditional if registry.platform() == "cpu" else jax.checkpoint


def _conditional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with a gradient that computes it again in a condition.

    The condition is always true.
    """

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves]
        floats = [leaf for leaf, floating in zip(leaves, is_float, strict=True) if floating]
        others = [leaf for leaf, floating in zip(leaves, is_float, strict=True) if not floating]

        def of_parts(floats: list[Any], others: list[Any]) -> Any:
            parts = iter(floats), iter(others)
            return function(*jax.tree.unflatten(structure, [next(parts[not floating]) for floating in is_float]))

        return _recomputed(of_parts)(floats, others)

    return run


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function(floats, others)`` with a gradient that stores the arguments only.

    It is the gradient in the first argument.
    """

    def gradient(stored: Any, cotangents: Any) -> tuple[Any, None]:
        floats, others = stored

        def compute() -> Any:
            (found,) = jax.vjp(lambda floats: function(floats, others), floats)[1](cotangents)
            return found

        is_true = jax.lax.rng_uniform(0.0, 1.0, ()) < 2.0  # a constant, but not for XLA
        return jax.lax.cond(is_true, compute, lambda: jax.tree.map(jnp.zeros_like, floats)), None

    recomputed = jax.custom_vjp(function)
    recomputed.defvjp(lambda floats, others: (function(floats, others), (floats, others)), gradient)
    return recomputed
