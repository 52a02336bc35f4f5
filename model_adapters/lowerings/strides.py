"""Strides of tensors, which JAX does not have.

PyTorch's own operators tell them on tensors without values. Whether PyTorch's ``reshape``, ``flatten`` or
``contiguous`` gives a view or a copy depends on them. A tensor is in C order if nothing else is noted of it. What is
noted is computed when something asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from model_adapters.bridge.views import TorchTensor
from model_adapters.errors import UnsupportedModelError

UNKNOWN = object()
"""In place of strides that PyTorch's own operator did not tell."""
COPIED = object()
"""In place of strides: PyTorch cannot view so, and copies."""
_DEEPEST = 40
"""The number of operators behind each other whose strides are not computed yet; Python's stack holds some hundreds."""
_IN_C_ORDER = frozenset({"linear", "mm", "bmm", "addmm", "baddbmm", "embedding", "native_layer_norm", "repeat"})
"""Operators whose results are in C order, whatever their operands are."""
_IN_OTHER_ORDER = """
einsum svd linalg_svd _linalg_svd linalg_solve linalg_solve_ex _linalg_solve_ex linalg_tensorsolve linalg_qr linalg_eig
linalg_eigh _linalg_eigh linalg_inv_ex linalg_cholesky_ex cholesky cholesky_solve cholesky_inverse triangular_solve
linalg_solve_triangular lu_solve linalg_lu_factor_ex linalg_lu_solve linalg_pinv linalg_lstsq geqrf
ormqr lu_unpack scaled_dot_product_attention nonzero
"""
"""Operators whose results may be in another order, although their operands are in C order."""
_OTHER_NAMES = frozenset(_IN_OTHER_ORDER.split())
_BY_LIBRARY = frozenset({"_fft_c2c", "_fft_r2c", "_fft_c2r"})
"""Operators whose results have the order that a library of the processor gives them."""


class Later:
    """The strides of an operator's results, computed at the first question."""

    def __init__(self, func: Any, args: Any, kwargs: Any, num_results: int, is_view: bool) -> None:
        self._func, self._args, self._kwargs = func, _described(args), _described(kwargs)
        self._num, self._follows = num_results, not is_view and keeps_order(func)
        self._found: list[Any] | None = None
        self.depth = 1 + _depth((self._args, self._kwargs))

    def of(self, place: int) -> Any:
        """Returns the strides of a result.

        None if it is in C order, else a tensor without values or one of this module's constants.
        """
        if self._found is None:
            self._found = self._computed()
            self._args = self._kwargs = None
        return self._found[place]

    def _computed(self) -> list[Any]:
        if self._follows and all(each.is_in_c_order() for each in _operands((self._args, self._kwargs))):
            return [None] * self._num
        try:
            with no_dispatch(), torch._C.DisableTorchFunction():
                found = self._func(*_made(self._args), **_made(self._kwargs))
        except Exception as error:  # what it computes without values, PyTorch decides
            copies = isinstance(error, RuntimeError) and "view size is not compatible" in str(error)
            return [COPIED if copies else UNKNOWN] * self._num
        found = found if isinstance(found, (tuple, list)) else (found,)
        return [told(each) for each in found] if len(found) == self._num else [UNKNOWN] * self._num


class _Operand:
    """A tensor without its values, and perhaps without its strides so far."""

    def __init__(self, tensor: Any) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._noted = tensor._noted if isinstance(tensor, TorchTensor) else _of_host(tensor)
        self.depth = self._noted[0].depth if isinstance(self._noted, tuple) else 0

    def is_in_c_order(self) -> bool:
        """Tells whether the tensor is in C order."""
        return resolved(self._noted) is None

    def made(self) -> torch.Tensor:
        """Returns the tensor; raises NotImplementedError if its strides are not known."""
        strided = resolved(self._noted)
        if strided is UNKNOWN or strided is COPIED:
            raise NotImplementedError
        return torch.empty(self._shape, dtype=self._dtype, device="meta") if strided is None else strided


def _of_host(tensor: torch.Tensor) -> Any:
    with no_dispatch(), torch._C.DisableTorchFunction():
        if tensor.is_contiguous():
            return None
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _described(value: Any) -> Any:
    """Returns arguments with an `_Operand` in place of each tensor, and without devices."""
    if isinstance(value, torch.Tensor):
        return _Operand(value)
    if type(value) in (list, tuple):
        return type(value)(map(_described, value))
    if type(value) is dict:
        return {name: _described(each) for name, each in value.items() if name != "device"}
    return value


def _operands(value: Any) -> Iterator[_Operand]:
    if isinstance(value, _Operand):
        yield value
    for part in value.values() if type(value) is dict else value if type(value) in (list, tuple) else ():
        yield from _operands(part)


def _depth(value: Any) -> int:
    return max((each.depth for each in _operands(value)), default=0)


def _made(value: Any) -> Any:
    if isinstance(value, _Operand):
        return value.made()
    if type(value) in (list, tuple):
        return type(value)(map(_made, value))
    return {name: _made(each) for name, each in value.items()} if type(value) is dict else value


def resolved(noted: Any) -> Any:
    """Returns strides that were noted, computed by now."""
    return noted[0].of(noted[1]) if isinstance(noted, tuple) else noted


def noted_of(func: Any, args: Any, kwargs: Any, num_results: int, *, is_strided: bool, is_view: bool) -> list[Any]:
    """Returns what is to be noted of the results of an operator.

    `is_strided` says that an operand may be in another than C order, or that the results, which `is_view` says are
    views, are views of one.
    """
    name = _name(func)
    if name in _BY_LIBRARY:
        return [UNKNOWN] * num_results
    if name in _IN_C_ORDER or not (is_strided or name in _OTHER_NAMES):
        return [None] * num_results
    later = Later(_BY_KERNEL.get(name, func), args, kwargs, num_results, is_view or name in _BY_KERNEL)
    return [later.of(place) if later.depth > _DEEPEST else (later, place) for place in range(num_results)]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns a tensor of the strides of attention, which on CPUs are those of `query`.

    Raises NotImplementedError where PyTorch has no kernel of its own for it.
    """
    if query.shape[-1] != value.shape[-1] or any(each.stride(-1) != 1 for each in (query, key, value)):
        raise NotImplementedError
    return torch.empty_like(query)


def _group_norm(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """Returns tensors of the strides of ``native_group_norm``.

    PyTorch brings its operand into an order before.
    """
    is_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    rows = x.new_empty((x.shape[0], args[-2]))
    return torch.empty(x.shape, device="meta", memory_format=_channels(is_last)), rows, rows


def _channels(are_last: bool) -> torch.memory_format:
    return torch.channels_last if are_last else torch.contiguous_format


_BY_KERNEL: dict[str, Any] = {"scaled_dot_product_attention": _attention, "native_group_norm": _group_norm}
"""Operators whose results on CPUs have other strides than those without values."""


def keeps_order(func: Any) -> bool:
    """Tells whether results of `func` are in C order where its operands are."""
    name = _name(func)
    return name not in _OTHER_NAMES and name not in _BY_LIBRARY


@functools.cache
def _name(func: Any) -> str:
    name = func.name().partition("::")[2] if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", "")
    return str(name).partition(".")[0]


def told(meta: Any) -> Any:
    """Returns what is noted of a tensor without values that has the strides in question."""
    if not isinstance(meta, torch.Tensor) or meta.device.type != "meta":
        return UNKNOWN
    return None if meta.is_contiguous() and meta.storage_offset() == 0 else meta


def after_index(tensor: Any, index: Any) -> Any:
    """Returns what is noted of ``tensor[index]``, a view."""
    with no_dispatch(), torch._C.DisableTorchFunction():
        try:
            return told(_Operand(tensor).made()[index])
        except Exception:  # an index of unknown value
            return UNKNOWN


def install() -> None:
    """Makes torch views tell strides as PyTorch has them."""
    TorchTensor._noted = None
    TorchTensor._strided = property(_get, _set)
    TorchTensor.stride = _stride
    TorchTensor.storage_offset = _storage_offset
    TorchTensor.is_contiguous = is_contiguous


def _get(tensor: Any) -> Any:
    noted = tensor._noted
    if isinstance(noted, tuple):
        noted = tensor._noted = resolved(noted)
    return noted


def _set(tensor: Any, noted: Any) -> None:
    if noted is not None or tensor._noted is not None:
        tensor._noted = noted


def empty(tensor: Any, memory_format: Any = torch.contiguous_format) -> torch.Tensor:
    """Returns a tensor without values of the shape of `tensor`."""
    with no_dispatch(), torch._C.DisableTorchFunction():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=memory_format)


def _with_strides(tensor: Any) -> torch.Tensor:
    """Returns a tensor without values that has the strides of `tensor`.

    Raises UnsupportedModelError if they are not known.
    """
    strided = tensor._strided
    if strided is UNKNOWN:
        raise UnsupportedModelError(
            "the model's code reads strides that are not known: expected a tensor in C order; use contiguous and clone"
        )
    made: torch.Tensor = empty(tensor) if strided is None else strided
    return made


def _stride(self: Any, dim: int | None = None) -> Any:
    """Computes ``tensor.stride()``."""
    strides = _with_strides(self).stride()
    return strides if dim is None else strides[dim]


def _storage_offset(self: Any) -> int:
    """Computes ``tensor.storage_offset()``."""
    return int(_with_strides(self).storage_offset())


def is_contiguous(self: Any, memory_format: Any = torch.contiguous_format) -> bool:
    """Computes ``tensor.is_contiguous()``; where strides are not known, False."""
    strided = self._strided
    if strided is None and memory_format == torch.contiguous_format:
        return True
    return strided is not UNKNOWN and bool(_with_strides(self).is_contiguous(memory_format=memory_format))


def offsets(shape: Sequence[int], meta: Any) -> np.ndarray:
    """Returns the places of a tensor's elements in their memory, int64[numel]."""
    if meta is None:
        return np.arange(int(np.prod(shape)))
    places = np.full((1,) * meta.ndim, meta.storage_offset())
    for axis, (length, stride) in enumerate(zip(meta.shape, meta.stride(), strict=True)):
        places = places + (np.arange(length) * stride).reshape(-1, *(1,) * (meta.ndim - axis - 1))
    return places.reshape(-1)
