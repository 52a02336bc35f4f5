"""Copies and weights of a model on JAX for deepcopy, pickle, ``torch.save``, ``state_dict``."""

from __future__ import annotations

import copy
from typing import Any

import torch

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import UnsupportedModelError
from torchax_serve.generation.submodule_overrides import has_parts_on_jax
from torchax_serve.runtime.eager import shared_tensors

_NOT_COPIED = frozenset({"_jax_runtime", "_engine_rows"})


def state_to_copy(model: Any) -> dict[str, Any]:
    """Returns the attributes of a copy of a model on JAX, weights with values included.

    Raises:
        UnsupportedModelError: its weights are on several devices, or its submodules call this runtime.
    """
    runtime = model._jax_runtime
    if runtime.program.sharding is not None:
        raise UnsupportedModelError(
            "a model whose weights lie on a mesh of devices cannot be copied; load it again with serve(mesh=...)"
        )
    if has_parts_on_jax(model):
        raise UnsupportedModelError(
            f"a {type(model).__name__} that runs on JAX cannot be copied, since parts of it are bound to this one; "
            "copy it before to_jax, or load it again"
        )
    state = {name: value for name, value in vars(model).items() if name not in _NOT_COPIED}
    if any(tensor.is_meta for tensor in named_tensors(model).values()):
        state = vars(with_values(model))
    return state


def with_values(model: Any) -> Any:
    """Returns a copy of a model on JAX in eager PyTorch.

    Its tensors share memory with the arrays if they can.
    """
    cls = type(model)._torch_class
    eager_copy = cls.__new__(cls)
    attributes = {name: value for name, value in vars(model).items() if name not in _NOT_COPIED}
    vars(eager_copy).update(copy.deepcopy(attributes, {id(model): eager_copy}))  # tensors without values cost nothing
    for name, tensor in shared_tensors(model, model._jax_runtime.weights).items():
        path, _, attribute = name.rpartition(".")
        setattr(eager_copy.get_submodule(path), attribute, tensor)
    return eager_copy


def torch_state(model: Any) -> dict[str, torch.Tensor] | None:
    """Returns the values of a model whose tensors are on the meta device.

    None if ``state_dict`` has them.
    """
    names = {name: tensor for name, tensor in named_tensors(model).items() if tensor.is_meta}
    if not names:
        return None
    runtime = model._jax_runtime
    if runtime.program.sharding is not None:
        raise UnsupportedModelError(
            "state_dict: expected weights on one device, got a model on a mesh; load it with transformers"
        )
    return shared_tensors(model, runtime.weights)
