"""Fixes of operators that torchax 0.0.13 lowers badly."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import (
    TorchTensor,
    as_views,
    default_env,
    get_lowering,
    is_view,
    jax_view,
    set_lowering,
    set_raw_lowering,
    set_view_lowering,
    torch_view,
    torchax,
)
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings import constant_folding
from model_adapters.lowerings.inverse_views import viewed_bits
from model_adapters.lowerings.written_results import write


def _mend_copy() -> None:
    """Fixes ``tensor.copy_(other)``: torchax 0.0.13 does not broadcast."""

    def copy(x: torch.Tensor, y: torch.Tensor, non_blocking: bool = False, env: Any = None) -> torch.Tensor:
        write(x, y)
        return x

    set_raw_lowering(torch.ops.aten.copy_, copy)


def _update_running_statistics() -> None:
    """Makes batch norms in training write the means and variances that they keep.

    torchax 0.0.13 computes them and drops them.
    """
    aten = torch.ops.aten

    def writes(theirs: Any) -> Any:
        def batch_norm(
            x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
        ) -> Any:
            if training and any(each is not None and not is_view(each) for each in (mean, var)):
                raise UnsupportedModelError(
                    "batch_norm: expected running statistics of the module or made from its inputs, got tensors on "
                    "the host; make them by new_zeros"
                )
            found = torch_view(theirs(*jax_view(as_views((x, weight, bias, mean, var))), training, momentum, eps))
            if training and mean is not None:
                array, axes = jax_view(as_views(x)), tuple(axis for axis in range(x.ndim) if axis != 1)
                for kept, of_batch in ((mean, jnp.mean(array, axes)), (var, jnp.var(array, axes, ddof=1))):
                    write(kept, kept * (1 - momentum) + torch_view(of_batch * momentum))
            return found

        return batch_norm

    for operator in (aten.native_batch_norm, aten._native_batch_norm_legit.default):
        set_view_lowering(operator, writes(get_lowering(operator)))


def _view_bits() -> None:
    """Registers ``tensor.view(dtype)``, which torchax 0.0.13 takes for a shape."""

    def view(x: jax.Array, dtype: torch.dtype) -> jax.Array:
        wanted = jnp.dtype(str(dtype).removeprefix("torch."))
        if jax.dtypes.canonicalize_dtype(wanted) != wanted:
            raise UnsupportedModelError(f"view({dtype}): expected a dtype of at most 32 bits, which JAX has here")
        return viewed_bits(x, wanted)

    set_lowering(torch.ops.aten.view.dtype, view)


def _mend_type_as() -> None:
    """Fixes ``tensor.type_as(other)``.

    torchax 0.0.13 changes the tensor itself.
    """

    def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.to(other.dtype)

    TorchTensor.type_as = type_as


def _return_named_results() -> None:
    """Lets functions of JAX return what ``max``, ``sort`` and others do: tuples with names."""

    def parts_of(found: Any) -> tuple[Any, Any]:
        return tuple(found), type(found)

    def made_of(kind: Any, parts: Any) -> Any:
        return kind(parts)

    for kind in torch.return_types.all_return_types:
        with contextlib.suppress(ValueError):  # other code has registered it
            jax.tree_util.register_pytree_node(kind, parts_of, made_of)


def _take_quantiles_of_the_host() -> None:
    """Lets ``quantile`` have its places on the host, whose device PyTorch compares."""
    for function in (torch.quantile, torch.nanquantile, torch.Tensor.quantile, torch.Tensor.nanquantile):

        def taken(x: torch.Tensor, q: Any, *args: Any, function: Any = function, **kwargs: Any) -> Any:
            x, q = as_views((x, q))
            return function(x, q, *args, **kwargs)

        set_view_lowering(function, taken)


def _take_by_host_indices() -> None:
    """Lets ``take_along_dim`` have indices on the host, whose device PyTorch compares."""
    gather = get_lowering(torch.ops.aten.gather)

    def take(x: jax.Array, indices: jax.Array, dim: int | None = None) -> jax.Array:
        if dim is None:
            x, indices, dim = x.reshape(-1), indices.reshape(-1), 0
        indices = indices % max(x.shape[dim], 1)  # as PyTorch has it for those from the end, and for all others
        shape, chosen = list(x.shape), list(indices.shape)
        shape[dim] = chosen[dim] = 1
        both = jnp.broadcast_shapes(tuple(shape), tuple(chosen))
        lengths = [(*both[: dim % x.ndim], each.shape[dim], *both[dim % x.ndim + 1 :]) for each in (x, indices)]
        taken: jax.Array = gather(jnp.broadcast_to(x, lengths[0]), dim, jnp.broadcast_to(indices, lengths[1]))
        return taken

    for function in (torch.take_along_dim, torch.Tensor.take_along_dim):
        set_lowering(function, take)


_NARROW = (torch.int8, torch.uint8, torch.int16)
"""Integers that PyTorch makes of floats by way of wider ones, whose last bits they are."""


def _wrapped(x: jax.Array) -> jax.Array:
    """Returns floats as int32, and 0 for what is beyond; JAX has the nearest narrow integer."""
    return jnp.where(jnp.abs(x) < 2.0**31, x, 0).astype(jnp.int32)


def _stay_on_device() -> None:
    """Ignores the device in ``tensor.to("cpu")`` of a traced tensor: a program has only one.

    Also takes the dtype that torchax 0.0.13 gives for ``as_tensor(tensor, dtype)``, which is one of JAX.
    """
    env = default_env()
    theirs = env._to_copy

    def to_copy(x: torch.Tensor, dtype: Any, device: Any) -> torch.Tensor:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            dtype = torchax.ops.mappings.j2t_dtype(dtype)
        if dtype in _NARROW and is_view(x) and x.dtype.is_floating_point:
            x = torch_view(_wrapped(jax_view(x)))
        return theirs(x, dtype, None if constant_folding.is_traced(x) else device)

    env._to_copy = to_copy
    by_arguments = env._torch_Tensor_to

    def to(args: Any, kwargs: Any) -> torch.Tensor:
        flags = [each for each in args if isinstance(each, bool)]  # non_blocking and copy
        found: torch.Tensor = by_arguments(args, kwargs)
        return found.clone() if kwargs.get("copy") or flags[1:] == [True] else found

    env._torch_Tensor_to = to
    env.override_op_definition(torch.Tensor.cpu, lambda x, *args, **kwargs: x)


def _name_unknown_dtypes() -> None:
    """Makes a dtype that JAX lacks, such as ``torch.complex32``, an error that names it."""
    mappings = torchax.ops.mappings
    theirs = mappings.t2j_dtype

    def t2j_dtype(dtype: torch.dtype) -> Any:
        try:
            return theirs(dtype)
        except RuntimeError:
            raise UnsupportedModelError(
                f"{dtype}: expected a dtype that JAX has; convert to another, such as float32 or complex64"
            ) from None

    mappings.t2j_dtype = t2j_dtype


def _keep_values_of_new_tensors() -> None:
    """Lets ``tensor.new_tensor(data)`` be a tensor on the host.

    torchax 0.0.13 makes it a tensor without values.
    """

    def new_tensor(self: torch.Tensor, data: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        dtype = self.dtype if dtype is None else dtype
        return data.to(dtype) if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=dtype)

    TorchTensor.new_tensor = new_tensor


def _tell_missing_at_once() -> None:
    """Says that a torch function has no lowering before its operands are taken apart.

    Most functions have none, and run as the operators that they consist of. torchax 0.0.13 finds that out last.
    """
    env = default_env()
    theirs, tables = env.dispatch, (env._ops, env._decomps, torchax.tensor.TENSOR_CONSTRUCTORS, {torch.Tensor.to})
    of_dispatcher = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        is_elsewhere = isinstance(func, of_dispatcher) or any(func in table for table in tables)
        if is_elsewhere or (kwargs and "out" in kwargs) or constant_folding.writes_in_place(func):
            return theirs(func, types, args, kwargs)
        raise torchax.tensor.OperatorNotFound(f"{func} has no lowering")

    env.dispatch = dispatch


def _order_equal_values() -> None:
    """Fixes ``tensor.sort(descending=True)``: torchax 0.0.13 turns equal values round.

    PyTorch compares the other way and sorts by the same algorithm, which keeps their order in short rows.
    """
    ascending = get_lowering(torch.ops.aten.sort)

    def sort(x: jax.Array, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Any, Any]:
        if not descending or x.ndim == 0 or jnp.issubdtype(x.dtype, jnp.complexfloating):
            return ascending(x, dim, descending, stable)
        order = jnp.argsort(~_ordered_integers(x), axis=dim, stable=stable)
        return jnp.take_along_axis(x, order, axis=dim), order

    set_lowering(torch.ops.aten.sort, sort)


def _ordered_integers(x: jax.Array) -> jax.Array:
    """Returns integers in the order of the values of `x`: NaN above all, both zeros equal."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
    signed = jnp.int64 if wide.dtype.itemsize == 8 else jnp.int32
    same = jnp.where(jnp.isnan(wide), jnp.nan, jnp.where(wide == 0, 0.0, wide))
    bits = jax.lax.bitcast_convert_type(same, signed)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(signed).max, bits)
