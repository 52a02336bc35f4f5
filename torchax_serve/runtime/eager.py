"""Runs the same model with the same weights in eager PyTorch, for `verify` and `bench`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax
import torch
from transformers import PreTrainedModel

from model_adapters.bridge.views import named_tensors, to_torch_tensor
from model_adapters.errors import (
    InvalidArgumentError,
    OutOfMemoryError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from model_adapters.loading import LoadedModel
from model_adapters.ops.compressed_weight import Weights, unpacked
from model_adapters.program.trace_context import config_overrides, restored_attributes
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.runtime.static_args import NEEDS_VALUES, place_in_code


class EagerReference:
    """A transformers model in eager PyTorch that reads the very arrays of a loaded JAX model.

    Where the caller passed a model object, the reference is a copy of it with its own weights.

    Attributes:
        module: the model, in evaluation mode.
        shares_weights: whether its parameters are the JAX arrays: in their memory on a CPU, copies elsewhere.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.module: PreTrainedModel = copy.deepcopy(loaded.module).eval()
        self.shares_weights = loaded.source.kind != "object"
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}
        if self.shares_weights:
            self._take(loaded.weights)

    def _take(self, weights: Weights) -> None:
        for name, tensor in shared_tensors(self.module, weights).items():
            path, _, attribute = name.rpartition(".")
            setattr(self.module.get_submodule(path), attribute, tensor)
            self._versions[name] = (tensor, tensor._version)

    def check_untouched(self) -> None:
        """Raises `UnsupportedModelError` if the model's code has written into the weights it shares."""
        changed = [
            name
            for name, (tensor, version) in self._versions.items()
            if isinstance(tensor, torch.nn.Parameter) and tensor._version != version
        ]
        if changed:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} changes its weights while it runs ({changed[0]}), which it shares with "
                "the JAX model here: load it with transformers and pass the object, which is copied"
            )


def shared_tensors(module: torch.nn.Module, weights: Weights) -> dict[str, torch.Tensor]:
    """Returns CPU tensors of `module` by name, which share memory with CPU `weights`.

    Tied ones are one tensor.
    """
    dense = {id(weight): unpacked(weight) for weight in weights.values()}
    arrays = {name: dense[id(weight)] for name, weight in weights.items()}
    tensors: dict[int, torch.Tensor] = {}  # by id of the array
    state = {}
    for name, template in named_tensors(module).items():
        array = arrays[name]
        if id(array) not in tensors:
            tensor = shared_tensor(array).to(template.dtype)
            is_parameter = isinstance(template, torch.nn.Parameter)
            tensors[id(array)] = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        state[name] = tensors[id(array)]
    return state


def shared_tensor(array: jax.Array) -> torch.Tensor:
    """Returns a CPU tensor that shares a CPU float array's memory; copies others."""
    is_on_cpu = all(device.platform == "cpu" for device in array.devices())
    if is_on_cpu and array.ndim and jax.numpy.issubdtype(array.dtype, jax.numpy.floating):
        exported: Any = array  # torch's annotation knows tensors alone
        return torch.from_dlpack(exported)
    return to_torch_tensor(array)


LARGEST_BYTES = 8_000_000_000
"""Of weights with which a failed call is tried once more: PyTorch computes on the host."""


class FailsInTorchError(UnsupportedModelError):
    """A forward that eager PyTorch fails on as well, whose error is the cause."""


_ERRORS_OF_ARGUMENTS = (InvalidArgumentError, UnsupportedArgumentError, OutOfMemoryError, jax.errors.JaxRuntimeError)
_OF_A_TRACE = (*NEEDS_VALUES, jax.errors.UnexpectedTracerError)


def raise_for_call(
    runtime: ModelRuntime, cls: type, given: Mapping[str, Any], error: Exception, *, is_repeatable: bool
) -> None:
    """Raises UnsupportedModelError for a call whose error is not of this project.

    It has PyTorch's own error if the call fails in eager PyTorch, too; else the place in the model's code that cannot
    be traced. Errors about which nothing more is known are left to the caller: those of a running program, and those
    of model code that could not be tried in PyTorch.

    Args:
        runtime: of the model.
        cls: the model's class as transformers has it.
        given: arguments of its forward, tensors on the CPU.
        error: that the call ended with here.
        is_repeatable: whether `given` is all that the call depends on, so that PyTorch can be asked.
    """
    if isinstance(error, _ERRORS_OF_ARGUMENTS):
        return
    size = sum(array.nbytes for array in {id(array): array for array in runtime.weights.values()}.values())
    is_tried = is_repeatable and runtime.program.sharding is None and size <= LARGEST_BYTES
    reason = _error_in_torch(runtime, cls, given) if is_tried else None
    if reason is None and not isinstance(error, TorchaxServeError) and (is_tried or isinstance(error, _OF_A_TRACE)):
        lines = str(error).strip().splitlines() or [""]
        raise UnsupportedModelError(
            f"{runtime.config.model_type}: expected a forward that can be traced, got {type(error).__name__} at "
            f"{place_in_code(error, cls.__module__) or cls.__name__}: {lines[0][:200]}; run this model in PyTorch"
        ) from error
    if reason is not None:
        said = " ".join(str(reason).split())[:300]
        raise FailsInTorchError(
            f"{runtime.config.model_type}: expected a forward that runs in PyTorch, got one that PyTorch itself fails "
            f"on, without JAX: {cls.__name__} raised {type(reason).__name__}: {said}; try other arguments, or another "
            "configuration or version of transformers"
        ) from reason


def _error_in_torch(runtime: ModelRuntime, cls: type, given: Mapping[str, Any]) -> Exception | None:
    """Returns the error of `cls` on `given` in eager PyTorch; None if it runs."""
    module = runtime.program.module
    state = shared_tensors(module, runtime.weights)
    copied = copy.copy(module)
    copied.__class__ = cls
    with (
        config_overrides(module, attention=None, experts="eager"),  # no trace meanwhile
        restored_attributes(module),
        torch.nn.utils.stateless._reparametrize_module(copied, state),
        torch.no_grad(),
    ):
        try:
            copied(**given)
        except Exception as error:  # whatever model code raises
            return error
    return None
