"""Inverses of PyTorch's views: the array of a base after a write into a view of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.errors import UnsupportedModelError

Read = Callable[[Any], Any]
Write = Callable[[Any, Any], Any]
_RESHAPED = ("view", "unsqueeze", "squeeze", "alias", "detach", "view_as", "lift_fresh")
_IN_PARTS = (
    "split",
    "split_with_sizes",
    "unbind",
    "tensor_split",
    "chunk",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "unsafe_chunk",
)


def inverse_of(
    func: Any, read: Read, rest: Sequence[Any], kwargs: dict[str, Any], place: int, shapes: Sequence[tuple[int, ...]]
) -> Write:
    """Returns the inverse of the view `func`, a torch operator.

    It takes the base's array before and the new array of the view, and returns the base's array.

    Args:
        func: The operator.
        read: Computes the view of a base's array.
        rest, kwargs: Arguments of the operator behind the base.
        place: Number of the view among the results.
        shapes: Of all results.
    """
    name, _, overload = func.name().partition("::")[2].partition(".")
    if overload == "dtype":
        return lambda full, new: viewed_bits(new, full.dtype)
    if name in _RESHAPED:
        return lambda full, new: new.reshape(full.shape)
    if name in ("_conj", "_neg_view"):
        return lambda full, new: read(new)
    if name == "view_as_real":
        return lambda full, new: jax.lax.complex(new[..., 0], new[..., 1])
    if name == "view_as_complex":
        return lambda full, new: jnp.stack([new.real, new.imag], -1)
    if name == "real":
        return lambda full, new: jax.lax.complex(new, full.imag) if jnp.iscomplexobj(full) else new
    if name == "imag":
        return lambda full, new: jax.lax.complex(full.real, new)
    arguments = _arguments(func, rest, kwargs)
    if name in ("transpose", "t", "permute"):
        return lambda full, new: new.transpose(_turned_back(name, arguments, full.ndim))
    if name in ("select", "slice") and all(isinstance(each, int | None) for each in arguments.values()):
        return lambda full, new: full.at[_one_part(name, arguments, full.ndim)].set(new)
    if name in _IN_PARTS:
        return lambda full, new: full.at[_part(name, arguments, place, shapes, full.ndim)].set(new)
    return lambda full, new: _scattered(name, read, full, new)


def _arguments(func: Any, rest: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments behind the base by their names, with their defaults."""
    declared = func._schema.arguments[1:]
    values = {each.name: each.default_value for each in declared if each.has_default_value()}
    return values | {each.name: value for each, value in zip(declared, rest, strict=False)} | kwargs


def _turned_back(name: str, arguments: dict[str, Any], ndim: int) -> np.ndarray:
    order = list(range(ndim))
    if name == "permute":
        order = [dim % ndim for dim in arguments["dims"]] if ndim else []
    elif ndim > 1:
        first, second = (0, 1) if name == "t" else (arguments["dim0"] % ndim, arguments["dim1"] % ndim)
        order[first], order[second] = order[second], order[first]
    return np.argsort(order).astype(int)


def _one_part(name: str, arguments: dict[str, Any], ndim: int) -> tuple[Any, ...]:
    part = arguments["index"] if name == "select" else slice(arguments["start"], arguments["end"], arguments["step"])
    return (*(slice(None),) * (arguments["dim"] % ndim), part)


def _part(
    name: str, arguments: dict[str, Any], place: int, shapes: Sequence[tuple[int, ...]], ndim: int
) -> tuple[Any, ...]:
    dim = arguments["dim"] % ndim
    if name == "unbind":
        return (*(slice(None),) * dim, place)
    start = sum(shape[dim] for shape in shapes[:place])
    return (*(slice(None),) * dim, slice(start, start + shapes[place][dim]))


def viewed_bits(x: jax.Array, wanted: Any) -> jax.Array:
    """Returns the bits of `x` as numbers of the dtype `wanted`, parts in the last axis."""
    if x.dtype == wanted:
        return x
    if x.dtype == jnp.complex64:  # XLA has no bits of complex numbers
        x = jnp.stack([x.real, x.imag], -1).reshape(*x.shape[:-1], -1)
    if wanted == jnp.complex64:
        parts = viewed_bits(x, jnp.dtype(jnp.float32))
        return jax.lax.complex(parts[..., ::2], parts[..., 1::2])
    num_parts = wanted.itemsize // x.dtype.itemsize
    if num_parts > 1:
        return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, num_parts), wanted)
    bits = jax.lax.bitcast_convert_type(x, wanted)
    return bits.reshape(*x.shape[:-1], -1) if bits.ndim > x.ndim else bits


def _scattered(name: str, read: Read, full: Any, new: Any) -> Any:
    """Returns `full` with `new` where the view has its elements, found by viewing their numbers."""
    with jax.ensure_compile_time_eval():
        places = np.asarray(read(jnp.arange(full.size, dtype=jnp.int32).reshape(full.shape))).reshape(-1)
    if len(np.unique(places)) != len(places):
        raise UnsupportedModelError(
            f"the model's code writes into a view that has elements more than once ({name}): expected a view of each "
            "element once; write into a clone of it"
        )
    return full.reshape(-1).at[places].set(new.reshape(-1), unique_indices=True).reshape(full.shape)
