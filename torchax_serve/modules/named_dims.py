"""Names of the dimensions of a module's arguments: which are rows, and which may be padded."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError

BATCH = "batch"
"""Name of dimensions of rows that do not depend on each other."""
MAX_ROWS = 32
"""Rows of a batch of several calls; a power of two. A call with more has a batch of its own."""
LEAST_LEN = 8
"""Shortest bucket of a named dimension other than `BATCH`; the others are powers of two."""

Dims = tuple[str | None, ...]
"""Name of each dimension of an argument; None for one whose length has a program of its own."""


def dims_of_forward(forward: Callable[..., Any], given: Mapping[str, Sequence[str | None]] | None) -> dict[str, Dims]:
    """Returns the names of dimensions of each argument that has some.

    Args:
        forward: Forward of a class, whose arguments may be annotated, as
            ``x: Annotated[torch.Tensor, "batch", "time", None]``.
        given: Names by argument, in place of the annotations.

    Raises:
        InvalidArgumentError: `given` names an argument that the forward does not have, or is no names.
    """
    parameters = dict(list(inspect.signature(forward).parameters.items())[1:])
    if given is None:
        hints = typing.get_type_hints(forward, include_extras=True)
        found = {name: hint.__metadata__ for name, hint in hints.items() if typing.get_origin(hint) is typing.Annotated}
        return {name: tuple(each) for name, each in found.items() if name in parameters and _are_names(each)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name, dims in given.items():
        if name not in parameters and not takes_any:
            raise InvalidArgumentError(f"dims: expected arguments of forward ({', '.join(parameters)}), got {name!r}")
        if isinstance(dims, str) or not _are_names(dims):
            raise InvalidArgumentError(
                f"dims[{name!r}]: expected a name or None for each dimension, such as ('batch', 'time'), got {dims!r}"
            )
    return {name: tuple(dims) for name, dims in given.items()}


def _are_names(dims: Sequence[Any]) -> bool:
    return all(each is None or isinstance(each, str) for each in dims)


@dataclasses.dataclass(frozen=True)
class NamedCall:
    """A call: its tensors, and everything else as one value.

    Attributes:
        tensors: Leaves of ``(args, kwargs)`` that are tensors, in order.
        dims: Names of the dimensions of each.
        others: The tree, and the values of all other leaves with their places.
        lens: Length of each named dimension.
    """

    tensors: tuple[torch.Tensor, ...]
    dims: tuple[Dims, ...]
    others: tuple[Any, tuple[tuple[int, Any], ...]]
    lens: dict[str, int]

    @classmethod
    def of(cls, bound: inspect.BoundArguments, dims: Mapping[str, Dims]) -> NamedCall:
        """Returns the call of the bound arguments of a forward.

        Raises:
            InvalidArgumentError: an argument that is no tensor, or has other dimensions than its names; two dimensions
                of one name have different lengths.
        """
        tensors: list[torch.Tensor] = []
        named: list[Dims] = []
        others: list[tuple[int, Any]] = []
        lens: dict[str, int] = {}
        leaves, tree = jax.tree_util.tree_flatten_with_path((bound.args, bound.kwargs))
        names = list(bound.signature.parameters)
        for index, (path, value) in enumerate(leaves):
            name = str(path[1].key) if path[0].idx else names[min(path[1].idx, len(names) - 1)]
            value = torch.as_tensor(value) if isinstance(value, np.ndarray) else value
            if not isinstance(value, torch.Tensor):
                others.append((index, value))
                continue
            own = dims.get(name, ()) if len(path) == 2 else ()
            if own and len(own) != value.ndim:
                raise InvalidArgumentError(
                    f"{name}: expected {len(own)} dimensions ({', '.join(map(str, own))}), got the shape "
                    f"{tuple(value.shape)}; correct it"
                )
            for dim, length in zip(own, value.shape, strict=False):
                if dim is not None and lens.setdefault(dim, length) != length:
                    raise InvalidArgumentError(
                        f"{name}: expected {lens[dim]} in the dimension {dim}, as of the argument before, got {length}"
                    )
            tensors.append(value)
            named.append(own or (None,) * value.ndim)
        return cls(tuple(tensors), tuple(named), (tree, tuple(others)), lens)

    @property
    def num_rows(self) -> int | None:
        """Number of rows; None if not every tensor has rows."""
        has_rows = bool(self.tensors) and all(BATCH in dims for dims in self.dims)
        return self.lens[BATCH] if has_rows else None

    def key(self) -> Hashable:
        """Returns what calls have in common whose rows can be those of one batch."""
        if self.num_rows is None:
            return object()
        shapes = tuple(
            (tensor.dtype, *(None if dim == BATCH else size for dim, size in zip(dims, self.bucket(at), strict=True)))
            for at, (tensor, dims) in enumerate(zip(self.tensors, self.dims, strict=True))
        )
        values = tuple((index, type(value), value) for index, value in self.others[1])
        return shapes, self.others[0], values

    def bucket(self, at: int) -> tuple[int, ...]:
        """Returns the padded shape of a tensor, rows aside."""
        sizes = zip(self.dims[at], self.tensors[at].shape, strict=True)
        return tuple(bucket_of(size) if dim not in (None, BATCH) else size for dim, size in sizes)

    def padded(self) -> NamedCall:
        """Returns the call with zeros behind, up to the buckets of its lengths."""
        tensors = tuple(_padded(tensor, self.bucket(at)) for at, tensor in enumerate(self.tensors))
        lens = {name: size if name == BATCH else bucket_of(size) for name, size in self.lens.items()}
        return dataclasses.replace(self, tensors=tensors, lens=lens)

    def of_lens(self, lens: Mapping[str, int]) -> NamedCall:
        """Returns a call of zeros with other lengths of its named dimensions."""
        made = []
        for tensor, dims in zip(self.tensors, self.dims, strict=True):
            shape = [size if dim is None else lens[dim] for dim, size in zip(dims, tensor.shape, strict=True)]
            made.append(tensor.new_zeros(shape))
        return dataclasses.replace(self, tensors=tuple(made), lens=dict(lens))

    def not_of_buckets(self) -> NamedCall:
        """Returns a call of three rows and of lengths that are no buckets, so that it is padded."""
        tensors, lens = [], dict(self.lens)
        for tensor, dims in zip(self.tensors, self.dims, strict=True):
            for axis, dim in enumerate(dims):
                if dim == BATCH:
                    lens[dim] = 3
                    tensor = tensor.index_select(axis, torch.arange(3) % tensor.shape[axis])
                elif dim is not None:
                    lens[dim] = max(1, tensor.shape[axis] - (tensor.shape[axis] == bucket_of(tensor.shape[axis])))
                    tensor = tensor.narrow(axis, 0, lens[dim])
            tensors.append(tensor)
        return dataclasses.replace(self, tensors=tuple(tensors), lens=lens)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``(args, kwargs)`` of the call."""
        tree, others = self.others
        known, tensors = dict(others), iter(self.tensors)
        leaves = [known[index] if index in known else next(tensors) for index in range(tree.num_leaves)]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return args, kwargs


def bucket_of(length: int) -> int:
    """Returns the length that a dimension of `length` is padded to: a power of two."""
    return max(LEAST_LEN, 1 << max(0, length - 1).bit_length())


def _padded(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) == shape:
        return tensor
    made = tensor.new_zeros(shape)
    made[tuple(slice(size) for size in tensor.shape)] = tensor
    return made


def joined(calls: Sequence[NamedCall]) -> NamedCall:
    """Returns one call with the rows of all, and copies of its last row up to a power of two."""
    num_rows = sum(call.num_rows or 0 for call in calls)
    size = 1 << max(0, num_rows - 1).bit_length()
    tensors = []
    for at, dims in enumerate(calls[0].dims):
        axis = dims.index(BATCH)
        parts = [call.tensors[at] for call in calls]
        last = parts[-1].narrow(axis, parts[-1].shape[axis] - 1, 1)
        tensors.append(torch.cat([*parts, *[last] * (size - num_rows)], axis))
    return dataclasses.replace(calls[0], tensors=tuple(tensors), lens={**calls[0].lens, BATCH: size})
