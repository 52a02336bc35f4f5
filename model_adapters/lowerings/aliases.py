"""Views of tensors: what shares memory in PyTorch is written together.

A JAX array never changes, so a write in place gives its tensor another array. A tensor that a view was made of, and the
view, remember what they share (`Alias`). After a write into one of them the others get their arrays anew: the base by
the inverse of the view, its other views by making them again.

Whether PyTorch's ``reshape``, ``flatten`` or ``contiguous`` gives a view or a copy depends on the tensor's strides,
which JAX does not have. Tensors of other than contiguous strides have them in `_strided`, a tensor without values.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch

from model_adapters.bridge.views import TorchTensor, as_views, default_env, jax_view, remove_lowering
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings.inverse_views import inverse_of
from model_adapters.ops import registry

UNKNOWN = object()
"""In place of strides that PyTorch's own operator did not tell."""
_SAME_STRIDES = ("aten::view", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::alias")
"""Views that are contiguous where their base is."""
_ONCE = ("aten::view", "aten::contiguous")
"""Operators that share memory or copy, by the strides of their operand."""


@dataclasses.dataclass(eq=False)
class Alias:
    """What a tensor shares memory with.

    Attributes:
        array: Of a base, the array of all that memory; of a view unused.
        strided: Of a base, its strides as `_strided` has them.
        members: Of a base, weak references to all tensors that share its memory.
        parent: Of a view, what it was made of.
        read: Of a view, computes its array from the parent's.
        write: Of a view, returns the parent's array for the parent's array before and a new array of the view.
        is_uncertain: Whether PyTorch may have copied here.
        is_conjugate: Whether the view has the conjugates of its parent.
    """

    array: Any = None
    strided: Any = None
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
    env = default_env()
    theirs = env.dispatch

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, torch._ops.OpOverload) and torch.Tag.inplace_view in func.tags:
            return _changed_in_shape(func, args, kwargs or {})
        if func is torch.ops.aten.as_strided.default and getattr(args[0], "_strided", None) is not None:
            args = _of_base(*args, **(kwargs or {}))
            kwargs = {}
        result = theirs(func, types, args, kwargs)
        _note(theirs, func, types, args, kwargs or {}, result)
        return result

    env.dispatch = dispatch
    TorchTensor._elem = property(_read, _write)
    TorchTensor._alias = TorchTensor._strided = None
    TorchTensor.detach = _detach
    TorchTensor.data = property(_detach, _rebound)
    TorchTensor.contiguous = _contiguous
    TorchTensor.resolve_conj = _resolve_conj
    remove_lowering(torch.tensor_split)  # as a function of arrays; it consists of views


def _read(tensor: Any) -> Any:
    try:
        return tensor._array
    except AttributeError:  # made before `install`
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
        raise UnsupportedModelError(
            "the model's code writes into a tensor whose strides are not known, behind reshape, flatten or contiguous: "
            "expected code that says whether it writes into a view or into a copy; use view or clone"
        )
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
        tensor._alias = Alias(array=tensor._elem, strided=tensor._strided)
        _join(tensor)
    return tensor._alias


def _join(tensor: Any) -> None:
    base = tensor._alias.base()
    base.members = [each for each in base.members if each() is not None and each() is not tensor]
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
    made._strided = tensor._strided


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


def _note(theirs: Any, func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Remembers which strides results have, and what they share with the first operand."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    if not any(isinstance(each, TorchTensor) for each in results):
        return
    parent = args[0] if args and isinstance(args[0], TorchTensor) and _makes_views(func) else None
    operands = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, TorchTensor)]
    is_strided = any(x._strided is not None for x in operands)
    metas: Any = [None] * len(results)
    if is_strided or (parent is not None and func.name().partition(".")[0] not in _SAME_STRIDES):
        metas = _metas(func, args, kwargs, len(results))
    for place, (made, meta) in enumerate(zip(results, metas, strict=True)):
        is_noted = not isinstance(func, torch._ops.OpOverload) and getattr(made, "_alias", None) is not None
        if not isinstance(made, TorchTensor) or any(made is x for x in operands) or is_noted:
            continue
        if parent is None:
            made._alias = None
        elif meta is not _COPIED and made._alias is None:
            _share_view(theirs, func, types, args, kwargs, place, made, results, meta)
        made._strided = None if meta is _COPIED else meta


_COPIED = object()  # in place of strides: PyTorch cannot view so, and copies


def _share_view(
    theirs: Any, func: Any, types: Any, args: Any, kwargs: Any, place: int, made: Any, results: Any, meta: Any
) -> None:
    parent, rest, is_one = args[0], args[1:], not isinstance(results, list | tuple) or len(results) == 1

    def read(array: Any) -> Any:
        found = theirs(func, types, (TorchTensor(array, default_env()), *rest), kwargs)
        return jax_view(found if is_one and not isinstance(found, list | tuple) else found[place])

    name = func.name().partition(".")[0]
    write = inverse_of(func, read, rest, kwargs, place, [tuple(each.shape) for each in results])
    share(made, parent, read, write, is_uncertain=meta is UNKNOWN and name in _ONCE)
    made._alias.is_conjugate = name == "aten::_conj"


@functools.cache
def _makes_views(func: Any) -> bool:
    """Tells whether results of `func` share memory with its first operand."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.arguments:
        return False
    given = func._schema.arguments[0].alias_info
    return given is not None and not given.is_write and any(x.alias_info is not None for x in func._schema.returns)


def _meta(tensor: Any) -> Any:
    """Returns a tensor of the same strides without values.

    Raises NotImplementedError if they are not known.
    """
    if not isinstance(tensor, TorchTensor):
        return tensor
    if tensor._strided is UNKNOWN:
        raise NotImplementedError
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if tensor._strided is None else tensor._strided


def _metas(func: Any, args: Any, kwargs: Any, num_results: int) -> list[Any]:
    """Returns the strides of results by PyTorch's own operator.

    None if they are contiguous; else a tensor, `UNKNOWN` or `_COPIED`.
    """
    with no_dispatch(), torch._C.DisableTorchFunction():
        try:
            args, kwargs = _pytree.tree_map_only(torch.Tensor, _meta, (args, kwargs))
            found = func(*args, **kwargs)
        except Exception as error:  # what it computes without values, PyTorch decides
            copies = isinstance(error, RuntimeError) and "view size is not compatible" in str(error)
            return [_COPIED if copies else UNKNOWN] * num_results
    found = found if isinstance(found, (tuple, list)) else (found,)
    if len(found) != num_results:
        return [UNKNOWN] * num_results
    return [_told(each) for each in found]


def _told(meta: Any) -> Any:
    if not isinstance(meta, torch.Tensor) or meta.device.type != "meta":
        return UNKNOWN
    return None if meta.is_contiguous() and meta.storage_offset() == 0 else meta


def _changed_in_shape(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Computes ``unsqueeze_`` and its like: the tensor becomes a view of what it was."""
    tensor, *rest = args
    packet = getattr(torch.ops.aten, func._schema.name.partition("::")[2].removesuffix("_"), None)
    overload = getattr(packet, func._overloadname, None)
    if overload is None or not _makes_views(overload) or not isinstance(tensor, TorchTensor):
        raise UnsupportedModelError(f"{func.name()}: expected a change of shape that is a view; use view and clone")
    with default_env()._dispatch_mode:
        view = overload(tensor, *rest, **kwargs)
    array = view._elem
    if view is not tensor:
        moved(tensor, view)
        tensor._array = array
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
    self._array = source._elem
    share(self, source, lambda array: array, lambda full, new: new)
    self._strided = source._strided


def _contiguous(self: Any, memory_format: Any = torch.contiguous_format) -> torch.Tensor:
    """Computes ``tensor.contiguous()``: `self`, or a copy if its strides are others.

    A copy keeps what was noted of the values as attributes.
    """
    strided = self._strided
    if strided is None or (strided is not UNKNOWN and strided.is_contiguous()):
        return self
    made = TorchTensor(self._elem, self._env)
    vars(made).update({name: value for name, value in vars(self).items() if name not in ("_alias", "_strided")})
    if strided is UNKNOWN:
        share(made, self, lambda array: array, lambda full, new: new, is_uncertain=True)
    return made


def _resolve_conj(self: Any) -> torch.Tensor:
    """Computes ``tensor.resolve_conj()``: a copy of a conjugate view, else `self`."""
    num_turns = 0 if self._alias is None else sum(each.is_conjugate for each in self._alias.path())
    return TorchTensor(self._elem, self._env) if num_turns % 2 else self


def _of_base(tensor: Any, size: Any, stride: Any, storage_offset: int | None = None) -> tuple[Any, ...]:
    """Returns arguments of ``as_strided`` of all the memory that `tensor` is a part of."""
    alias, strided = tensor._alias, tensor._strided
    if alias is None or strided is UNKNOWN or alias.base().strided is not None:
        raise UnsupportedModelError("as_strided: expected a tensor of known strides, or a view of one; use contiguous")
    full = TorchTensor(alias.base().array, default_env())
    full._alias = alias.base()
    return full, size, stride, strided.storage_offset() if storage_offset is None else storage_offset


def are_apart(one: Any, other: Any) -> bool:
    """Tells whether two tensors are known to share no element."""
    if one._alias is None or other._alias is None or one._alias.base() is not other._alias.base():
        return True
    size = int(np.prod(one._alias.base().array.shape))
    if one._strided is UNKNOWN or other._strided is UNKNOWN or size > 1 << 24:
        return False
    return not np.isin(_offsets(one), _offsets(other)).any()


def _offsets(tensor: Any) -> np.ndarray:
    """Returns the places of the elements in their memory, int64[numel]."""
    meta = tensor._strided
    if meta is None:
        return np.arange(int(np.prod(tensor.shape)))
    places = np.full((1,) * meta.ndim, meta.storage_offset())
    for axis, (length, stride) in enumerate(zip(meta.shape, meta.stride(), strict=True)):
        places = places + (np.arange(length) * stride).reshape(-1, *(1,) * (meta.ndim - axis - 1))
    return places.reshape(-1)


def getitem(self: Any, index: Any) -> torch.Tensor:
    """Returns ``self[index]`` for integers, slices, None and ...: a view."""
    made = TorchTensor(self._elem[index], self._env)
    share(made, self, lambda array: array[index], lambda full, new: full.at[index].set(new))
    with no_dispatch(), torch._C.DisableTorchFunction():
        try:
            made._strided = _told(_meta(self)[index])
        except Exception:  # an index of unknown value
            made._strided = UNKNOWN
    return made
