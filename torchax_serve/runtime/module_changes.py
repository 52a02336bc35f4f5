"""Follows changes of a model after it was put on JAX: whether it still runs, its weights."""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.bridge.host_arrays import check_floats
from model_adapters.bridge.views import named_tensors, to_jax_array
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.quantized_weight import QuantizedWeight
from model_adapters.program.model_program import ModelProgram
from model_adapters.program.module_watch import Change


def check_can_follow(program: ModelProgram, weights: Weights, change: Change) -> None:
    """Raises an error if the module of `program` cannot run on JAX after `change`."""
    module = program.module
    if program.sharding is not None:
        raise UnsupportedModelError(
            f"the model has changed ({change.what}), and its weights lie on a mesh of devices: change it before serve"
        )
    if getattr(module, "is_quantized", False) or getattr(module, "hf_quantizer", None) is not None:
        raise UnsupportedModelError("the model has been quantized, which is not supported here: serve it unquantized")
    _check_quantized(named_tensors(module), weights, change)
    for name, tensor in named_tensors(module).items():
        if tensor.is_meta:
            _check_on_device(name, tensor, weights, change)
        elif tensor.device.type != "cpu":
            raise InvalidArgumentError(
                f'{name}: expected a tensor on the CPU, got one on {tensor.device}; call model.to("cpu"), JAX has its '
                "own devices"
            )
    check_floats(module)
    _check_parts_evaluate(module)


def _check_quantized(tensors: dict[str, torch.Tensor], weights: Weights, change: Change) -> None:
    """Raises UnsupportedModelError if a tensor whose quantized form is in use has changed."""
    for name, weight in weights.items():
        if not isinstance(weight, QuantizedWeight) or (name in tensors and tensors[name].is_meta):
            continue
        if name in change.tensors or name not in tensors or not _fits(weight, tensors[name]):
            raise UnsupportedModelError(
                f"{name}: the model has changed ({change.what}), and its quantized weight is that of before; change it "
                "first, then call to_jax or serve with quantization on a model loaded anew"
            )


def _check_on_device(name: str, tensor: torch.Tensor, weights: Weights, change: Change) -> None:
    """Raises InvalidArgumentError if the meta `tensor` is not the one that the device has."""
    array = weights.get(name)
    if array is None:
        if name not in change.tensors:  # of a part that is not served, before as after
            return
        raise InvalidArgumentError(
            f"{name}: expected a tensor with values, got one on the meta device; load it, or call model.to_empty and "
            "fill it"
        )
    same = tuple(tensor.shape) == tuple(array.shape) and str(tensor.dtype).removeprefix("torch.") in (
        str(array.dtype),
        {"int32": "int64", "float32": "float64"}.get(str(array.dtype)),
    )
    if name in change.tensors or not same:
        raise UnsupportedModelError(
            f"{name}: its values lie on the device alone, since serve read them from files, and cannot be changed "
            f"from PyTorch; load the model with transformers, and pass the object to to_jax or serve"
        )


def check_evaluates(module: torch.nn.Module) -> None:
    """Raises InvalidArgumentError if `module` is in training mode."""
    if module.training:
        raise InvalidArgumentError("expected a model in evaluation mode, got one in training mode; call model.eval()")


def _check_parts_evaluate(module: torch.nn.Module) -> None:
    """Raises InvalidArgumentError if a submodule whose result it changes is in training mode."""
    for name, child in module.named_modules():
        if child.training and _differs_in_training(child):
            raise InvalidArgumentError(
                f"{name}: expected a part in evaluation mode, got one in training mode; call model.eval()"
            )


def _differs_in_training(child: torch.nn.Module) -> bool:
    if isinstance(child, torch.nn.modules.dropout._DropoutNd):
        return child.p > 0
    if isinstance(child, torch.nn.modules.batchnorm._NormBase):
        return child.track_running_stats
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(child).items())


def weights_of(module: torch.nn.Module, weights: Weights, change: Change) -> dict[str, Any]:
    """Returns the arrays of all tensors of `module` by name, those of `weights` if unchanged."""
    arrays: dict[int, Any] = {}
    found: dict[str, Any] = {}
    tensors = named_tensors(module)
    for name in [name for name, tensor in tensors.items() if tensor.is_meta and name not in weights]:
        del tensors[name]  # of a part that is not served
    for name, tensor in tensors.items():
        if name in weights and name not in change.tensors and _fits(weights[name], tensor):
            arrays.setdefault(id(tensor), weights[name])
    for name, tensor in tensors.items():
        if id(tensor) not in arrays:
            arrays[id(tensor)] = to_jax_array(tensor)
        found[name] = arrays[id(tensor)]
    return found


def _fits(array: Any, tensor: torch.Tensor) -> bool:
    return tuple(array.shape) == tuple(tensor.shape)
