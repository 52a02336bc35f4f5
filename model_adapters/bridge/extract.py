"""Torch modules as pure functions over JAX arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

import pytree_registry
from model_adapters.bridge.views import (
    JaxFunction,
    as_views,
    is_view,
    jax_view,
    named_tensors,
    to_jax_array,
    torch_mode,
    torch_view,
    torchax,
)
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.lowerings import argument_checks, install
from model_adapters.lowerings.missing import line_of
from model_adapters.program import shared_layers
from model_adapters.program.trace_context import torch_promotion


def functional_call(
    module: torch.nn.Module,
    method: str = "forward",
    transform: shared_layers.Transform | None = None,
    *,
    is_checked: bool = False,
) -> JaxFunction:
    """Returns a pure function that runs a method of `module` with given weights.

    ``f(weights, args, kwargs)`` runs ``module.method(*args, **kwargs)`` with `weights` in place of the module's own.
    Args and result are pytrees of JAX arrays; ``jax.jit`` and ``jax.grad`` apply to the function. One array may be
    given for a tuple of it. `transform`, such as `jax.checkpoint`, is applied to the function of each layer. With
    `is_checked`, what PyTorch's operators refuse is an error, where JAX would compute something.
    """
    install.install()
    options = {} if transform is None else {"transform": transform}
    pytree_registry.register_all()  # now the modeling file is loaded, with the outputs and caches it defines

    def call(weights: Mapping[str, jax.Array], args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        args, kwargs = _arguments(args, kwargs)
        with torch_promotion(), argument_checks.enabled() if is_checked else contextlib.nullcontext():
            state, args_view, kwargs_view = torch_view((dict(weights), args, kwargs))
            with torch_mode(module, state), shared_layers.intercepted(module, **options):
                try:
                    return jax_view(as_views(getattr(module, method)(*args_view, **kwargs_view)))
                except torchax.tensor.OperatorNotFound as error:
                    raise UnsupportedModelError(
                        f"{error} to JAX; write the model's code with other operators"
                    ) from None
                except _NEEDS_VALUES as error:
                    if not is_checked:
                        raise
                    raise _reads_values(error) from error
                except RuntimeError as error:  # of PyTorch's reader of arguments
                    if "item() cannot be called on meta" not in str(error):
                        raise
                    raise UnsupportedModelError(
                        f"expected numbers as sizes and ends, got a tensor ({line_of(error)}); pass int(tensor)"
                    ) from error

    return call


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What code raises that asks for values of a trace, which has none."""


def _reads_values(error: Exception) -> UnsupportedModelError:
    operator = getattr(error, "torch_operator", "_")
    is_number = operator.strip("_") in ("", "local_scalar_dense")
    reader = "code that" if is_number else f"{operator.lstrip('_').rstrip('2')}, which"
    return UnsupportedModelError(
        f"expected code whose steps and shapes do not depend on values of tensors, got {reader} reads a value in a "
        f"trace ({line_of(error)}); write it with torch.where and known sizes, or call the function outside of jax.jit"
    )


def _arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of ``f(weights, args, kwargs)``, all arrays as JAX arrays.

    NumPy and PyTorch arrays are converted.
    """
    if isinstance(args, Mapping) or not isinstance(kwargs, Mapping | None):
        raise InvalidArgumentError(
            "expected f(weights, args, kwargs) with a tuple of positional and a dict of keyword arguments, got "
            f"{type(args).__name__} and {type(kwargs).__name__}; pass f(weights, (), {{...}}) for keywords alone"
        )
    positional = tuple(args) if isinstance(args, tuple | list) else (args,)

    def as_array(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not is_view(leaf):
            return to_jax_array(leaf)
        return jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf

    made: tuple[tuple[Any, ...], dict[str, Any]] = jax.tree.map(as_array, (positional, dict(kwargs or {})))
    return made


def extract_jax(module: torch.nn.Module) -> tuple[dict[str, jax.Array], JaxFunction]:
    """Returns the weights of `module`, and its forward as a pure function of them.

    The function is called as ``function(weights, args, kwargs)`` and can be jitted. Tied weights appear once per name
    and share one array.
    """
    shared: dict[int, jax.Array] = {}
    weights = {}
    for name, tensor in named_tensors(module).items():
        if id(tensor) not in shared:
            shared[id(tensor)] = to_jax_array(tensor)
        weights[name] = shared[id(tensor)]
    return weights, functional_call(module, is_checked=True)
