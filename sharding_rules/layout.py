"""Layout of the elements of one dimension, divided evenly among devices.

They are ordered, repeated and filled up for that. A logical axis is counted in *units*, such as heads, that stay
together. Where there are fewer heads of keys and values than devices, each is repeated on a group of neighbours; where
a number does not divide, units of zeros are added. Both leave every result what it was: a head of zeros is multiplied
by zeros in the next product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ZERO = -1
"""Stands for a unit of zeros."""


@dataclass(frozen=True)
class AxisLayout:
    """The units of a logical axis on the devices.

    Attributes:
        num_before: units that the model has.
        units: for each unit on the devices the model's unit it holds, or `ZERO`; cut evenly among the devices.
    """

    num_before: int
    units: tuple[int, ...]

    @property
    def is_identity(self) -> bool:
        """Whether all units stay in place, without copies or padding."""
        return self.units == tuple(range(self.num_before))

    @property
    def has_padding(self) -> bool:
        """Whether there are units of zeros."""
        return ZERO in self.units

    def elements(self, width: int) -> np.ndarray:
        """Returns ``int64[len(units) * width]``: the source of each element; `ZERO` for a zero.

        Units have `width` elements.
        """
        units = np.asarray(self.units, np.int64)[:, None]
        return np.where(units == ZERO, ZERO, units * width + np.arange(width)).reshape(-1)


@dataclass(frozen=True)
class Fused:
    """Logical axes that one dimension holds one after the other."""

    axes: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """Parts that one dimension holds one after the other, each with its own heads.

    Attributes:
        sizes: elements of each part.
        heads: heads of each part, which devices divide; 0: every device has all of the part.
    """

    sizes: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DimLayout:
    """One dimension of a tensor on the devices.

    Attributes:
        size_before: as the model has it.
        size: on the mesh.
        mesh_axis: Mesh axis that it is divided along; None: replicated.
        index: ``int64[size]``, source of each element, `ZERO` for a zero; None: as it was.
        sections: lengths of the parts of a fused dimension, on the mesh and all devices together; empty otherwise.
            Each device has its share of all of them, in order.
        copied: numbers of the sections that every device has all of.
    """

    size_before: int
    size: int
    mesh_axis: str | None
    index: np.ndarray | None
    sections: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()


def padded_units(number: int, shards: int) -> AxisLayout:
    """Returns `number` units, padded with units of zeros to be divisible by `shards`."""
    missing = -number % shards
    return AxisLayout(number, (*range(number), *([ZERO] * missing)))


def layout_heads(heads: int, kv_heads: int, shards: int) -> tuple[AxisLayout, AxisLayout]:
    """Returns query heads and KV heads such that each device has the keys its queries read.

    Query head ``i`` reads head ``i // (heads / kv_heads)`` of the keys, before and after.

    Args:
        heads: query heads, a multiple of `kv_heads`.
        kv_heads: heads of keys and values.
        shards: devices.
    """
    group = heads // kv_heads
    # The fewest heads of keys that divide the devices or that the devices divide; those added are zeros.
    padded = next(n for n in range(kv_heads, kv_heads + shards + 1) if n % shards == 0 or shards % n == 0)
    repeats = max(1, shards // padded)
    part = math.ceil(group / repeats)  # query heads that read one copy
    queries: list[int] = []
    keys: list[int] = []
    for head in range(padded):
        for copy in range(repeats):
            keys.append(head if head < kv_heads else ZERO)
            for query in range(copy * part, (copy + 1) * part):
                queries.append(head * group + query if query < group and head < kv_heads else ZERO)
    return AxisLayout(heads, tuple(queries)), AxisLayout(kv_heads, tuple(keys))


def layout_dim(layout: AxisLayout, size: int, mesh_axis: str | None) -> DimLayout:
    """Returns a dimension of `size` that holds one logical axis."""
    if layout.is_identity:
        return DimLayout(size, size, mesh_axis, None)
    index = layout.elements(size // layout.num_before)
    return DimLayout(size, len(index), mesh_axis, index)


def fused_dim(layouts: Sequence[AxisLayout], sizes: Sequence[int], shards: int, mesh_axis: str | None) -> DimLayout:
    """Returns a dimension of several logical axes, divided evenly among the devices.

    Each device has its share of all of them, in order.

    Args:
        layouts: of the parts.
        sizes: of the parts, as the model has them.
        shards: devices.
        mesh_axis: that the dimension is divided along.
    """
    starts = np.cumsum([0, *sizes[:-1]])
    parts = []
    for layout, size, start in zip(layouts, sizes, starts, strict=True):
        elements = layout.elements(size // layout.num_before)
        parts.append(np.where(elements == ZERO, ZERO, elements + start).reshape(shards, -1))
    index = np.concatenate(parts, axis=1).reshape(-1)
    sections = tuple(part.size for part in parts)
    return DimLayout(sum(sizes), len(index), mesh_axis, index, sections)


def parts_dim(parts: Parts, shards: int, mesh_axis: str | None) -> DimLayout | None:
    """Returns a dimension of `parts`, of which each device has its heads.

    None where the devices do not divide all heads: nothing is filled up with zeros.
    """
    if any(heads % shards for heads in parts.heads):
        return None
    size = sum(parts.sizes)
    if len(parts.sizes) == 1:
        return DimLayout(size, size, mesh_axis, None)
    copied = tuple(number for number, heads in enumerate(parts.heads) if not heads)
    units = (tuple(range(part)) * (shards if number in copied else 1) for number, part in enumerate(parts.sizes))
    layouts = [AxisLayout(part, of_part) for part, of_part in zip(parts.sizes, units, strict=True)]
    return dataclasses.replace(fused_dim(layouts, parts.sizes, shards, mesh_axis), copied=copied)


def take(array: np.ndarray, dim: int, layout: DimLayout, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Returns elements `start` to `stop` of dimension `dim` in `layout`.

    They are taken from the model's own `array`.
    """
    stop = layout.size if stop is None else stop
    if layout.index is None:
        return array[(slice(None),) * dim + (slice(start, stop),)]
    index = layout.index[start:stop]
    taken = np.take(array, np.maximum(index, 0), axis=dim)
    is_zero = index == ZERO
    if is_zero.any():
        taken[(slice(None),) * dim + (is_zero,)] = 0
    return taken
