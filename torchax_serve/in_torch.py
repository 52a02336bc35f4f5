"""Whether a call that failed here fails in PyTorch, too: its error is then the one to read, and no bridge mends it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax
import torch

from model_adapters.errors import (
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from model_adapters.module_state import attributes_restored
from model_adapters.trace_config import implementations
from torchax_serve.eager_twin import shared_state
from torchax_serve.runtime import Runtime

LARGEST_BYTES = 8_000_000_000
"""Of weights with which a failed call is tried once more: PyTorch computes on the host."""
_NOT_OF_THE_MODEL = (InvalidArgumentError, UnsupportedArgumentError, OutOfMemoryError, jax.errors.JaxRuntimeError)


def refuse_what_torch_cannot(runtime: Runtime, cls: type, given: Mapping[str, Any], error: Exception) -> None:
    """Raises UnsupportedModelError, with PyTorch's own error, where the unmodified model fails on the call in PyTorch.

    Args:
        runtime: of the model.
        cls: the model's class as transformers has it.
        given: arguments of its forward, tensors on the CPU.
        error: that the call ended with here.
    """
    size = sum(array.nbytes for array in {id(array): array for array in runtime.weights.values()}.values())
    if isinstance(error, _NOT_OF_THE_MODEL) or runtime.program.sharding is not None or size > LARGEST_BYTES:
        return
    reason = _error_in_torch(runtime, cls, given)
    if reason is not None:
        said = " ".join(str(reason).split())[:300]
        raise UnsupportedModelError(
            f"{runtime.config.model_type}: expected a forward that runs in PyTorch, got one that PyTorch itself fails "
            f"on, without JAX: {cls.__name__} raised {type(reason).__name__}: {said}; try other arguments, or another "
            "configuration or version of transformers"
        ) from reason


def _error_in_torch(runtime: Runtime, cls: type, given: Mapping[str, Any]) -> Exception | None:
    """What `cls` raises on `given` in eager PyTorch, with the weights that are in use; None if nothing."""
    module = runtime.program.module
    state = shared_state(module, runtime.weights)
    twin = copy.copy(module)
    twin.__class__ = cls
    with (
        implementations(module, attention=None, experts="eager"),  # no trace meanwhile
        attributes_restored(module),
        torch.nn.utils.stateless._reparametrize_module(twin, state),
        torch.no_grad(),
    ):
        try:
            twin(**given)
        except Exception as error:  # whatever model code raises
            return error
    return None
