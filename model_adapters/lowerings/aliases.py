"""Views of tensors: what shares memory in PyTorch is written together.

A JAX array never changes, so a write in place gives its tensor another array. A tensor that a view was made of, and the
view, remember what they share (`Alias`). After a write into one of them the others get their arrays anew: the base by
the inverse of the view, its other views by making them again.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.bridge.views import (
    TorchTensor,
    as_views,
    default_env,
    is_view,
    jax_view,
    remove_lowering,
    set_first_operand,
    torchax,
)
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.lowerings import strides
from model_adapters.lowerings.inverse_views import inverse_of
from model_adapters.ops import registry

_SAME_STRIDES = ("aten::view", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::alias")
"""Views that are in C order where their base is."""
_UNSAFE = ("aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk")
"""Views, although their schemas do not say so."""
_ONCE = ("aten::view", "aten::contiguous")
"""Operators that share memory or copy, by the strides of their operand."""


@dataclasses.dataclass(eq=False)
class Alias:
    """What a tensor shares memory with.

    Attributes:
        array: Of a base, the array of all that memory; of a view unused.
        noted: Of a base, what is noted of its strides.
        members: Of a base, weak references to all tensors that share its memory.
        parent: Of a view, what it was made of.
        read: Of a view, computes its array from the parent's.
        write: Of a view, returns the parent's array for the parent's array before and a new array of the view.
        is_uncertain: Whether PyTorch may have copied here.
        is_conjugate: Whether the view has the conjugates of its parent.
    """

    array: Any = None
    noted: Any = None
    members: list[Any] = dataclasses.field(default_factory=list)
    parent: Alias | None = None
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any, Any], Any] | None = None
    is_uncertain: bool = False
    is_conjugate: bool = False

    def path(self) -> list[Alias]:
        """Returns the views from the base to this one, without the base."""
        return [] if self.parent is None else [*self.parent.path(), self]

    def base(self) -> Alias:
        """Returns the base, perhaps itself."""
        return self if self.parent is None else self.parent.base()

    def value(self) -> Any:
        """Returns the array, made from that of the base."""
        return self.array if self.parent is None else _known(self.read)(self.parent.value())


def _known(part: Any) -> Any:
    assert part is not None  # views have all parts
    return part


def install() -> None:
    """Makes torchax remember what shares memory, and tensors write to all of it."""
    strides.install()
    env = default_env()
    theirs = env.dispatch

    as_strided = torch.ops.aten.as_strided.default

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kind, kwargs = _kind_of(func), kwargs or {}
        if kind.has_views:
            return func(*args, **kwargs)  # as one of its overloads, which `env` gets
        if kind.changes_shape:
            return _changed_in_shape(func, args, kwargs)
        if func is torch.einsum and sum(map(is_view, jax.tree.leaves((args, kwargs), is_leaf=is_view))) == 1:
            raise torchax.tensor.OperatorNotFound("einsum of one operand consists of views")
        if func is as_strided and _is_part(args[0]):
            args = _of_base(*args, **kwargs)
            kwargs = {}
        try:
            result = theirs(func, types, args, kwargs)
        except jax.errors.ConcretizationTypeError as error:
            if not hasattr(error, "torch_operator"):  # the innermost one knows best
                error.torch_operator = getattr(func, "__name__", "_").partition(".")[0]  # type: ignore[attr-defined]
            raise
        _note(theirs, func, kind, types, args, kwargs, result)
        return result

    env.dispatch = dispatch
    TorchTensor._elem = property(operator.attrgetter("_array"), _write)
    TorchTensor._array = _MadeBefore()
    TorchTensor._alias = None
    TorchTensor.detach = _detach
    TorchTensor.data = property(_detach, _rebound)
    TorchTensor.contiguous = _contiguous
    TorchTensor.resolve_conj = _resolve_conj
    TorchTensor.fill_diagonal_ = _fill_diagonal
    remove_lowering(torch.Tensor.resize_)  # torchax resamples there
    set_first_operand(torch.stft, _in_c_order)  # PyTorch takes its parts by the strides of its own tensor
    remove_lowering(torch.tensor_split)  # as a function of arrays; it consists of views


class _MadeBefore:
    """The array of a tensor that was made before `install`, which has it under torchax's name."""

    def __get__(self, tensor: Any, owner: Any) -> Any:
        if tensor is None:
            return self
        if "_elem" not in vars(tensor):
            raise AttributeError("_array")
        tensor._array = vars(tensor).pop("_elem")
        return tensor._array


def _write(tensor: Any, array: Any) -> None:
    """Gives `tensor` another array, and tensors that share its memory theirs."""
    alias = tensor._alias
    before = vars(tensor).get("_array")
    tensor._array = array
    if before is None:
        vars(tensor).pop("_elem", None)
    if alias is None or before is array:
        return
    if before.shape != array.shape:
        raise UnsupportedModelError(
            f"expected a write of the shape {before.shape}, got {array.shape}, into a tensor that shares memory; "
            "make a copy of it first"
        )
    base = alias.base()
    others = [each for each in _members(base) if each is not tensor]
    path = alias.path()
    if any(each.is_uncertain for each in path) or any(
        each.is_uncertain for other in others for each in other._alias.path()
    ):
        if others:
            raise UnsupportedModelError(
                "the model's code writes into a tensor whose strides are not known, behind reshape, flatten or "
                "contiguous: expected code that says whether it writes into a view or into a copy; use view or clone"
            )
        tensor._alias, tensor._strided = None, strides.UNKNOWN  # nothing else reads that memory
        return
    for step in reversed(path):
        array = apart(_known(step.write)(_known(step.parent).value(), array))
    base.array = array
    for other in others:
        other._array = other._alias.value()


def apart(written: jax.Array) -> jax.Array:
    """Ends a fusion behind a write into a part of an array, in programs for CPUs.

    XLA of jaxlib 0.10.2 fuses a write in place with what its value is made of, and computes wrong numbers where that
    value reads other elements of the same array: ``q[:, :, n:] = rotate(q[:, :, n:])`` behind a norm and before the
    product of attention.
    """
    is_traced = isinstance(written, jax.core.Tracer)  # known values stay known
    return jax.lax.optimization_barrier(written) if is_traced and registry.platform() == "cpu" else written


def _members(base: Alias) -> Iterator[Any]:
    for reference in base.members:
        if (tensor := reference()) is not None and tensor._alias is not None and tensor._alias.base() is base:
            yield tensor


def _alias_of(tensor: Any) -> Alias:
    """Returns what `tensor` shares, which from now on it remembers."""
    if tensor._alias is None:
        tensor._alias = Alias(array=tensor._elem, noted=tensor._noted)
        _join(tensor)
    return tensor._alias


def _join(tensor: Any) -> None:
    base = tensor._alias.base()
    base.members = [each for each in base.members if (known := each()) is not None and known is not tensor]
    base.members.append(weakref.ref(tensor))


def share(
    tensor: Any,
    parent: Any,
    read: Callable[[Any], Any],
    write: Callable[[Any, Any], Any],
    *,
    is_uncertain: bool = False,
) -> None:
    """Remembers that `tensor` is a view of `parent`."""
    tensor._alias = Alias(parent=_alias_of(parent), read=read, write=write, is_uncertain=is_uncertain)
    _join(tensor)


def moved(made: Any, tensor: Any) -> None:
    """Lets `made`, of the same array, take the place of `tensor` in what it shares."""
    if tensor._alias is not None:
        made._alias = tensor._alias
        tensor._alias = None
        _join(made)
    made._noted = tensor._noted


def restorer(tensor: Any) -> Callable[[], None]:
    """Returns a function that gives `tensor` and what shares its memory the arrays back of now."""
    array, alias = tensor._elem, tensor._alias
    full = None if alias is None else alias.base().array
    others = [] if alias is None else [(each, each._elem) for each in _members(alias.base())]

    def restore() -> None:
        tensor._array, tensor._alias = array, alias
        if alias is not None:
            alias.base().array = full
        for other, before in others:
            other._array = before

    return restore


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a torch function does with memory.

    Attributes:
        name: Of an operator, without its overload.
        is_overload: Whether it is an operator of PyTorch's dispatcher.
        makes_views: Whether its results share memory with its first operand.
        changes_strides: Whether such results may be in another order than a base in C order.
        shares_or_copies: Whether it does either, by the strides of its operand.
        has_views: Whether it stands for operators of which some make views.
        changes_shape: Whether it makes its first operand a view of what that was.
        keeps_order: Whether results are in C order where the operands are.
    """

    name: str
    is_overload: bool
    makes_views: bool
    changes_strides: bool
    shares_or_copies: bool
    has_views: bool
    changes_shape: bool
    keeps_order: bool


@functools.cache
def _kind_of(func: Any) -> _Kind:
    is_overload = isinstance(func, torch._ops.OpOverload)
    name = func.name().partition(".")[0] if is_overload else ""
    makes_views = is_overload and _makes_views(func)
    return _Kind(
        name,
        is_overload,
        makes_views,
        makes_views and name not in _SAME_STRIDES,
        name in _ONCE,
        isinstance(func, torch._ops.OpOverloadPacket) and _first_of_views(func) is not None,
        is_overload and torch.Tag.inplace_view in func.tags,
        strides.keeps_order(func),
    )


def _note(theirs: Any, func: Any, kind: _Kind, types: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Remembers which strides results have, and what they share with the first operand."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    operands: list[Any] = []
    _add_tensors(args, operands)
    _add_tensors(kwargs.values(), operands)
    made = [
        (place, each)
        for place, each in enumerate(results)
        if isinstance(each, TorchTensor) and not any(each is x for x in operands)
    ]
    if not kind.is_overload:
        made = [(place, each) for place, each in made if each._alias is None]
    if not made:
        return
    parent = args[0] if kind.makes_views and args and isinstance(args[0], TorchTensor) else None
    is_strided = any(x._noted is not None for x in operands)
    may_differ = is_strided or (parent is not None and kind.changes_strides)
    noted = [None] * len(results)
    if may_differ or not kind.keeps_order:
        is_view = parent is not None
        noted = strides.noted_of(func, args, kwargs, len(results), is_strided=may_differ, is_view=is_view)
    shapes = () if parent is None else [each._elem.shape for each in results]
    for place, each in made:
        strided = noted[place]
        if parent is None:
            each._alias = None
        else:
            if is_strided and kind.shares_or_copies:
                strided = strides.resolved(strided)
            if strided is not strides.COPIED and each._alias is None:
                _share_view(theirs, func, kind, types, args, kwargs, place, each, shapes, strided)
        each._strided = None if strided is strides.COPIED else strided


def _add_tensors(values: Any, found: list[Any]) -> None:
    """Appends the torch views among arguments to `found`, those in lists, too."""
    for each in values:
        if isinstance(each, TorchTensor):
            found.append(each)
        elif type(each) in (list, tuple):
            _add_tensors(each, found)


def _share_view(
    theirs: Any,
    func: Any,
    kind: _Kind,
    types: Any,
    args: Any,
    kwargs: Any,
    place: int,
    made: Any,
    shapes: Any,
    strided: Any,
) -> None:
    """Remembers that `made`, one of results with `shapes`, is a view of the first operand."""
    parent, rest = args[0], args[1:]

    def read(array: Any) -> Any:
        found = theirs(func, types, (TorchTensor(array, default_env()), *rest), kwargs)
        return jax_view(found[place] if isinstance(found, list | tuple) else found)

    def write(full: Any, new: Any) -> Any:
        inverse = inverse_of(func, read, rest, kwargs, place, shapes)  # made here, since few views are written to
        return inverse(full, new)

    share(made, parent, read, write, is_uncertain=strided is strides.UNKNOWN and kind.shares_or_copies)
    made._alias.is_conjugate = kind.name == "aten::_conj"


def _makes_views(func: Any) -> bool:
    """Tells whether results of the operator `func` share memory with its first operand."""
    if not func._schema.arguments:
        return False
    if func.name().partition(".")[0] in _UNSAFE:
        return True
    given = func._schema.arguments[0].alias_info
    return given is not None and not given.is_write and any(x.alias_info is not None for x in func._schema.returns)


@functools.cache
def _first_of_views(packet: Any) -> Any:
    """Returns the first overload whose results share memory with its first operand, or None."""
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return next((each for each in overloads if isinstance(each, torch._ops.OpOverload) and _makes_views(each)), None)


def _changed_in_shape(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Computes ``unsqueeze_`` and its like: the tensor becomes a view of what it was."""
    tensor, *rest = args
    packet = getattr(torch.ops.aten, func._schema.name.partition("::")[2].removesuffix("_"), None)
    overload = getattr(packet, func._overloadname, None) or _first_of_views(packet)
    is_view_of_it = isinstance(overload, torch._ops.OpOverload) and _kind_of(overload).makes_views
    if not is_view_of_it or not isinstance(tensor, TorchTensor):
        raise UnsupportedModelError(f"{func.name()}: expected a change of shape that is a view; use view and clone")
    with default_env()._dispatch_mode:
        view = overload(tensor, *rest, **kwargs)
    array = view._elem
    if view is not tensor:
        moved(tensor, view)
        tensor._array = array
        torch._C._swap_tensor_impl(tensor, view)  # PyTorch's own code asks it for the shape
    return tensor


def _detach(self: Any) -> torch.Tensor:
    """Computes ``tensor.detach()``, which shares memory with `self`."""
    made = TorchTensor(jax.lax.stop_gradient(self._elem), self._env)
    share(made, self, jax.lax.stop_gradient, lambda full, new: new)
    made._strided = self._strided
    return made


def _rebound(self: Any, other: torch.Tensor) -> None:
    """Gives `self` the memory of `other`, for ``tensor.data = other``.

    Views of `self` keep what it had.
    """
    self._alias = None
    (source,) = as_views((other,))
    if self._array.shape != source._elem.shape or self.dtype != source.dtype:
        torch._C._swap_tensor_impl(self, TorchTensor(source._elem, default_env()))
    self._array = source._elem
    share(self, source, lambda array: array, lambda full, new: new)
    self._strided = source._strided


def _contiguous(self: Any, memory_format: Any = torch.contiguous_format) -> torch.Tensor:
    """Computes ``tensor.contiguous()``: `self`, or a copy if its strides are others.

    A copy keeps what was noted of the values as attributes.
    """
    if strides.is_contiguous(self, memory_format):
        return self
    made = TorchTensor(self._elem, self._env)
    vars(made).update({name: value for name, value in vars(self).items() if name not in ("_alias", "_noted")})
    if self._strided is strides.UNKNOWN:
        share(made, self, lambda array: array, lambda full, new: new, is_uncertain=True)
    if memory_format != torch.contiguous_format:
        made._strided = strides.empty(self, memory_format)
    return made


def _resolve_conj(self: Any) -> torch.Tensor:
    """Computes ``tensor.resolve_conj()``: a copy of a conjugate view, else `self`."""
    num_turns = 0 if self._alias is None else sum(each.is_conjugate for each in self._alias.path())
    return TorchTensor(self._elem, self._env) if num_turns % 2 else self


def _fill_diagonal(self: Any, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    """Computes ``tensor.fill_diagonal_()``, where PyTorch reads strides of its own tensor."""
    if self.ndim < 2 or (self.ndim > 2 and len(set(self.shape)) > 1):
        raise InvalidArgumentError(
            f"fill_diagonal_: expected two axes, or more of equal lengths, got the shape {tuple(self.shape)}"
        )
    rows = np.arange(self.shape[0] if wrap and self.ndim == 2 else min(self.shape))
    columns = rows % (self.shape[1] + 1)
    is_inside = columns < self.shape[1]
    self[tuple(torch.from_numpy(each[is_inside]) for each in (rows, *(columns,) * (self.ndim - 1)))] = fill_value
    return self


def _in_c_order(tensor: Any) -> Any:
    """Returns `tensor`, or a copy if it may be a part of another or in another order."""
    return TorchTensor(tensor._elem, default_env()) if _is_part(tensor) else tensor


def _is_part(tensor: Any) -> bool:
    """Tells whether `tensor` may share memory that is not its own, or has other than C order."""
    return isinstance(tensor, TorchTensor) and (tensor._strided is not None or tensor._alias is not None)


def _of_base(tensor: Any, size: Any, stride: Any, storage_offset: int | None = None) -> tuple[Any, ...]:
    """Returns arguments of ``as_strided`` of all the memory that `tensor` is a part of."""
    alias, strided = tensor._alias, tensor._strided
    if alias is None or strided is strides.UNKNOWN or strides.resolved(alias.base().noted) is not None:
        raise UnsupportedModelError("as_strided: expected a tensor of known strides, or a view of one; use contiguous")
    full = TorchTensor(alias.base().array, default_env())
    full._alias = alias.base()
    start = 0 if strided is None else strided.storage_offset()
    return full, size, stride, start if storage_offset is None else storage_offset


def are_apart(one: Any, other: Any) -> bool:
    """Tells whether two tensors are known to share no element."""
    if one._alias is None or other._alias is None or one._alias.base() is not other._alias.base():
        return True
    size = int(np.prod(one._alias.base().array.shape))
    if one.dtype.itemsize != other.dtype.itemsize:  # whose places are counted differently
        return False
    if one._strided is strides.UNKNOWN or other._strided is strides.UNKNOWN or size > 1 << 24:
        return False
    first, second = (strides.offsets(each.shape, each._strided) for each in (one, other))
    return not np.isin(first, second).any()


def getitem(self: Any, index: Any) -> torch.Tensor:
    """Returns ``self[index]`` for integers, slices, None and ...: a view."""
    _check_numbers(self, index)
    made = TorchTensor(self._elem[index], self._env)
    share(made, self, lambda array: array[index], lambda full, new: full.at[index].set(new))
    made._strided = strides.after_index(self, index)
    return made


def _check_numbers(tensor: Any, index: Any) -> None:
    """Raises IndexError for an integer beyond an axis, and ValueError for a step backwards.

    JAX takes the last element, or turns the axis round.
    """
    num_axes = sum(part is not None and part is not ... for part in index)
    axis = 0
    for part in index:
        if part is ...:
            axis += tensor.ndim - num_axes
        if type(part) is int and axis < tensor.ndim and not -tensor.shape[axis] <= part < tensor.shape[axis]:
            raise IndexError(f"expected an index along axis {axis} from 0 to {tensor.shape[axis] - 1}, got {part}")
        if type(part) is slice and type(part.step) is int and part.step < 1:
            raise ValueError(f"expected a slice with a step greater than zero, as in PyTorch, got {part.step}")
        axis += part is not None and part is not ...
