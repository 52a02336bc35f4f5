"""A quantized weight that transformers' loader takes for a tensor.

transformers renames, stacks, concatenates, splits and transposes the tensors of a checkpoint to fit its classes. A
`QuantizedTensor` does these operations on values, scales and offsets. Any other operation computes the dense weight,
which is correct and large, and is noted for the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from model_adapters.loading.formats.parts import QuantizedParts


class QuantizedTensor(torch.Tensor):
    """A weight of `dtype` for transformers' loader, with no memory but its parts."""

    parts: QuantizedParts
    labels: tuple[str, ...]
    made_dense: list[str]

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        parts: QuantizedParts,
        dtype: torch.dtype,
        name: str | tuple[str, ...],
        made_dense: list[str],
    ) -> QuantizedTensor:
        """Makes a tensor of `parts`.

        `made_dense` gets `name`, or those of all weights that were joined, when an operation needs the dense weight.
        """
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, parts.shape, dtype=dtype, device=torch.device("cpu"), requires_grad=False
        )
        tensor.parts, tensor.made_dense = parts, made_dense
        tensor.labels = (name,) if isinstance(name, str) else name
        return tensor

    def with_parts(self, parts: QuantizedParts, dtype: torch.dtype | None = None) -> QuantizedTensor:
        """Returns a tensor of other parts, for the same name."""
        return QuantizedTensor(parts, self.dtype if dtype is None else dtype, self.labels, self.made_dense)

    def to_dense(self) -> torch.Tensor:  # type: ignore[override]
        """Returns the dense weight, and notes that it was made."""
        self.note_dense()
        return self.parts.dense(self.dtype)

    def note_dense(self) -> None:
        """Notes that the weight is dense in the model."""
        self.made_dense += [label for label in self.labels if label not in self.made_dense]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is None and (func in _UNCHANGED or getattr(func, "__name__", "") in ("__get__", "__set__")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_dense_in(args), **{key: _dense_in(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_dense_in(args), **{key: _dense_in(value) for key, value in (kwargs or {}).items()})


def _dense_in(value: Any) -> Any:
    if isinstance(value, QuantizedTensor):
        return value.to_dense()
    if isinstance(value, list | tuple):
        return type(value)(_dense_in(each) for each in value)
    return value


# Functions that read what the tensor itself says; so do all attributes without a handler.
_UNCHANGED = {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.element_size, torch.Tensor.__len__}
_UNCHANGED |= {torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.is_floating_point, torch.is_complex}

_HANDLERS: dict[Any, Callable[..., Any]] = {}


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(handler: Callable[..., Any]) -> Callable[..., Any]:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return add


@_handles(torch.Tensor.contiguous, torch.Tensor.cpu, torch.Tensor.detach, torch.detach, torch.Tensor.clone, torch.clone)
def _same(tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return tensor.with_parts(tensor.parts)  # parts are never written to


@_handles(torch.Tensor.requires_grad_)
def _requires_grad(tensor: QuantizedTensor, requires_grad: bool = True) -> QuantizedTensor:
    return tensor  # nothing trains while a checkpoint is read


@_handles(torch.Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(tensor: QuantizedTensor) -> QuantizedTensor:
    return tensor


@_handles(torch.Tensor.to)
def _to(tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    copy = kwargs.pop("copy", False)
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if (device is not None and device.type != "cpu") or copy or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    return tensor.with_parts(tensor.parts, dtype)


@_handles(torch.equal, torch.Tensor.equal)
def _equal(first: Any, second: Any) -> Any:
    if not isinstance(first, QuantizedTensor) or not isinstance(second, QuantizedTensor):
        return NotImplemented
    if first.parts is second.parts:
        return True
    if first.parts.kind != second.parts.kind or first.shape != second.shape:
        return NotImplemented
    pairs = [(getattr(first.parts, part), getattr(second.parts, part)) for part in _PARTS]
    if any((a is None) != (b is None) for a, b in pairs):
        return NotImplemented
    return all(torch.equal(_bytes(a), _bytes(b)) for a, b in pairs if a is not None)


_PARTS = ("values", "scale", "offset", "columns")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _stored_axis(parts: QuantizedParts, dim: int) -> int:
    """Returns the axis of `values`, counted from the end, that is axis `dim` for model code."""
    axis = dim % len(parts.shape) - len(parts.shape)
    return {-1: -2, -2: -1}.get(axis, axis) if parts.transposed else axis


@_handles(torch.transpose, torch.Tensor.transpose, torch.swapaxes, torch.Tensor.swapaxes)
def _transpose(tensor: QuantizedTensor, dim0: int, dim1: int) -> Any:
    if {dim0 % tensor.ndim, dim1 % tensor.ndim} != {tensor.ndim - 1, tensor.ndim - 2}:
        return NotImplemented
    return tensor.with_parts(dataclasses.replace(tensor.parts, transposed=not tensor.parts.transposed))


@_handles(torch.Tensor.t, torch.t, torch.Tensor.T.__get__, torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
def _turned(tensor: QuantizedTensor) -> Any:
    return _transpose(tensor, -1, -2)


def _one_kind(tensors: Any) -> bool:
    if not tensors or not all(isinstance(tensor, QuantizedTensor) for tensor in tensors):
        return False
    first = tensors[0].parts

    def is_like(other: QuantizedParts) -> bool:
        same_order = (
            other.columns is None
            if first.columns is None
            else other.columns is not None and torch.equal(first.columns, other.columns)
        )
        return other.kind == first.kind and same_order

    return all(is_like(tensor.parts) for tensor in tensors)


def _joined(tensors: Sequence[QuantizedTensor], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> QuantizedTensor:
    parts = [tensor.parts for tensor in tensors]
    offsets = None
    if any(each.offset is not None for each in parts):
        offsets = join([torch.zeros_like(each.scale) if each.offset is None else each.offset for each in parts])
    values, scale = join([each.values for each in parts]), join([each.scale for each in parts])
    labels = tuple(dict.fromkeys(label for tensor in tensors for label in tensor.labels))
    joined = dataclasses.replace(parts[0], values=values, scale=scale, offset=offsets)
    return QuantizedTensor(joined, tensors[0].dtype, labels, tensors[0].made_dense)


def _concatenated(tensors: list[torch.Tensor], axis: int) -> torch.Tensor:
    if tensors[0].dtype.itemsize == 1:  # not every release of torch joins 8-bit floats
        return torch.cat([each.view(torch.uint8) for each in tensors], axis).view(tensors[0].dtype)
    return torch.cat(tensors, axis)


@_handles(torch.cat, torch.concat)
def _cat(tensors: Any, dim: int = 0) -> Any:
    if not _one_kind(tensors):
        return NotImplemented
    axis = _stored_axis(tensors[0].parts, dim)
    if axis == -1 and not all(_ends_with_a_group(tensor.parts) for tensor in tensors):
        return NotImplemented
    return _joined(tensors, lambda each: _concatenated(each, axis))


def _ends_with_a_group(parts: QuantizedParts) -> bool:
    return parts.columns is None and parts.values.shape[-1] % parts.group == 0 and parts.scale.shape[-1] > 1


@_handles(torch.stack)
def _stack(tensors: Any, dim: int = 0) -> Any:
    if dim != 0 or not _one_kind(tensors) or len({tuple(tensor.shape) for tensor in tensors}) > 1:
        return NotImplemented
    return _joined(tensors, lambda each: _concatenated([one[None] for one in each], 0))


@_handles(torch.split, torch.Tensor.split)
def _split(tensor: QuantizedTensor, sizes: Any, dim: int = 0) -> Any:
    axis, total = _stored_axis(tensor.parts, dim), tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    if axis != -1:
        pieces = [tensor.parts.values.split(sizes, axis), tensor.parts.scale.split(sizes, axis)]
        offset = tensor.parts.offset
        pieces.append([None] * len(sizes) if offset is None else offset.split(sizes, axis))
    else:
        group = tensor.parts.group
        if tensor.parts.columns is not None or any(size % group for size in sizes) or tensor.parts.scale.shape[-1] == 1:
            return NotImplemented
        groups = [size // group for size in sizes]
        pieces = [tensor.parts.values.split(sizes, -1), tensor.parts.scale.split(groups, -1)]
        offset = tensor.parts.offset
        pieces.append([None] * len(sizes) if offset is None else offset.split(groups, -1))
    return tuple(
        tensor.with_parts(dataclasses.replace(tensor.parts, values=values, scale=scale, offset=shift))
        for values, scale, shift in zip(*pieces, strict=True)
    )


@_handles(torch.chunk, torch.Tensor.chunk)
def _chunk(tensor: QuantizedTensor, chunks: int, dim: int = 0) -> Any:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


@_handles(torch.unbind, torch.Tensor.unbind)
def _unbind(tensor: QuantizedTensor, dim: int = 0) -> Any:
    if dim != 0 or tensor.ndim < 3:
        return NotImplemented
    return tuple(tensor.with_parts(tensor.parts.by_row(lambda part, i=i: part[i])) for i in range(tensor.shape[0]))


@_handles(torch.squeeze, torch.Tensor.squeeze)
def _squeeze(tensor: QuantizedTensor, dim: int | None = None) -> Any:
    if dim != 0 or tensor.ndim < 3:
        return NotImplemented
    return _unbind(tensor)[0] if tensor.shape[0] == 1 else tensor
