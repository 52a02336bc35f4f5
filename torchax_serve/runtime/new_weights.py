"""New values for the weights of a running model, checked and laid out as the old."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.bridge.host_arrays import to_numpy
from model_adapters.bridge.views import is_view, named_tensors, to_torch_tensor
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.ops.compressed_weight import CompressedWeight, Stored
from model_adapters.ops.memory_layout import place_of, put
from model_adapters.program.trace_context import trace_lock
from torchax_serve.runtime.model_runtime import ModelRuntime

NUM_NAMED = 4
"""Names that an error lists."""


def checked_weights(module: torch.nn.Module, held: Mapping[str, Any], given: Any, *, partial: bool) -> dict[str, Any]:
    """Returns the values of `given`, each under one name of those that share an array.

    Args:
        module: The model.
        held: Its weights by name.
        given: JAX, NumPy or PyTorch arrays by name of the model's ``state_dict``.
        partial: Whether weights may be missing, which then stay as they are.

    Raises:
        InvalidArgumentError: unknown or missing names, other shapes or kinds of numbers, tied weights that differ.
        UnsupportedModelError: weights that are stored in another form than arrays.
    """
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"weights: expected a mapping of arrays by name, got {type(given).__name__}")
    if unknown := [str(name) for name in given if name not in held]:
        raise InvalidArgumentError(
            f"weights: expected names of the model's state_dict, got {_listed(unknown)}; rename or remove them"
        )
    groups: dict[int, list[str]] = {}
    for name, weight in held.items():
        groups.setdefault(id(weight), []).append(name)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    missing, found = [], {}
    for names in groups.values():
        values = {name: given[name] for name in names if name in given}
        if not values:
            missing += [name for name in names if name in parameters][:1]
            continue
        name = next(iter(values))
        found[name] = _checked(name, values[name], held[name])
        for other, value in values.items():
            if value is not values[name] and not np.array_equal(_host(found[name]), _host(_checked(other, value))):
                raise InvalidArgumentError(
                    f"weights: expected equal values of {name} and {other}, which are one weight, got two; give one"
                )
    if missing and not partial:
        raise InvalidArgumentError(
            f"weights: expected all {len(parameters)} parameters of the model, got none for {_listed(missing)}; add "
            "them, or pass partial=True to leave them as they are"
        )
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more


def _checked(name: str, value: Any, held: Any = None) -> Any:
    """Returns `value` as a JAX or NumPy array."""
    if isinstance(held, Stored):
        remedy = "pack_weights=False" if isinstance(held, CompressedWeight) else 'quantization="none"'
        raise UnsupportedModelError(
            f"{name}: expected a weight that is an array, this one is stored as a {type(held).__name__}; serve the "
            f"model with {remedy}"
        )
    if isinstance(value, torch.Tensor) and not is_view(value):
        if value.device.type != "cpu":
            raise InvalidArgumentError(f"{name}: expected a tensor on the CPU, got one on {value.device}; call .cpu()")
        return to_numpy(value)
    if isinstance(value, jax.Array) and value.is_deleted():
        raise InvalidArgumentError(
            f"{name}: expected an array with values, got one that was donated; pass its successor"
        )
    if not isinstance(value, jax.Array | np.ndarray):
        raise InvalidArgumentError(f"{name}: expected a JAX, NumPy or PyTorch array, got {type(value).__name__}")
    return value


def _host(array: Any) -> np.ndarray:
    return np.asarray(array)


def laid_out(runtime: ModelRuntime, given: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns copies of `given` with the dtypes and shardings of the weights of `runtime`.

    They are under all names of the weights.

    Copies: a trainer may donate its arrays.

    Raises:
        InvalidArgumentError: a shape or kind of numbers differs, or a value that programs have as a constant.
    """
    made: dict[int, jax.Array] = {}
    for name, value in given.items():
        held: Any = runtime.weights[name]
        made[id(held)] = _laid_out(runtime, name, value, held)
    return {name: made[id(held)] for name, held in runtime.weights.items() if id(held) in made}


def _laid_out(runtime: ModelRuntime, name: str, value: Any, held: jax.Array) -> jax.Array:
    sharding = runtime.program.sharding
    placed = None if sharding is None else sharding.placed[name]
    shape = tuple(held.shape) if placed is None else placed.shape
    if tuple(value.shape) != shape:
        raise InvalidArgumentError(f"{name}: expected shape {shape}, got {tuple(value.shape)}")
    if jax.numpy.issubdtype(value.dtype, np.floating) != jax.numpy.issubdtype(held.dtype, np.floating):
        raise InvalidArgumentError(f"{name}: expected {held.dtype}, got {value.dtype}")
    constant = runtime.program.static_scalars.get(name)
    if constant is not None and int(value) != constant:
        raise InvalidArgumentError(
            f"{name}: expected {constant}, which the compiled programs have as a constant, got {int(value)}; serve the "
            "new model instead"
        )
    array = value if value.dtype == held.dtype else value.astype(held.dtype)
    if placed is not None and sharding is not None and not placed.is_unchanged:
        return sharding.put(name, np.asarray(array))
    return put(array, place_of(held))


def write_into_module(runtimes: list[ModelRuntime], given: Mapping[str, Any]) -> None:
    """Gives the module's tensors that have values of their own those of `given`.

    To the module this is no change.

    Tensors of a model that `serve` has read from files have none.
    """
    module = runtimes[0].program.module
    with trace_lock():  # a trace replaces them
        tensors = named_tensors(module)
        written = {id(tensors[name]): value for name, value in given.items() if name in tensors}
        changed = False
        for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
            if id(tensor) in written and not tensor.is_meta:
                tensor.data = to_torch_tensor(written[id(tensor)]).to(tensor.dtype)
                changed = True
        if changed:
            for runtime in runtimes:
                runtime.watch.take()
