"""The index of a layer inside a trace that other layers will share.

Layers know their index to find their part of the cache. A trace that used it for anything else, such as a condition or
a scale, holds for that layer alone.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_CACHE_CODE = "transformers.cache_utils"
"""Module that compares an index with the number of layers; ours are there."""


class Reads:
    """The reads in one trace that make its result depend on the index of the layer.

    Attributes:
        found: What was read; empty if nothing was.
    """

    def __init__(self) -> None:
        self.found: list[str] = []


class LayerIndex:
    """An index that stands for an int and records what is done with it.

    Only `OwnLayers` takes it without a record.

    Args:
        value: The index.
        reads: Where reads are recorded.
    """

    def __init__(self, value: int, reads: Reads) -> None:
        self.value, self._reads = value, reads

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class int, for ``isinstance``."""
        return int

    def read(self, name: str) -> int:
        """Records a read by the operation `name`; returns the index."""
        self._reads.found.append(f"the layer's index ({name})")
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(name), name)


def _method(name: str) -> Callable[..., Any]:
    is_order = name in ("__lt__", "__le__", "__gt__", "__ge__")

    def method(self: LayerIndex, *args: Any) -> Any:
        by_cache = is_order and sys._getframe(1).f_globals.get("__name__") == _CACHE_CODE
        value = self.value if by_cache else self.read(name)
        return getattr(value, name)(*args)

    return method


_BINARY = "add sub mul truediv floordiv mod divmod pow and or xor lshift rshift"
_OTHERS = "eq ne lt le gt ge hash bool int index float neg pos abs invert str repr format round trunc floor ceil"
_NAMES = [*_OTHERS.split(), *_BINARY.split(), *(f"r{name}" for name in _BINARY.split())]
for _name in _NAMES:
    setattr(LayerIndex, f"__{_name}__", _method(f"__{_name}__"))


class OwnLayers(list[Any]):
    """Cache layers of which only those of the traced layer may be used.

    Any other use is recorded.

    Args:
        layers: All cache layers.
        reads: Where reads are recorded.
    """

    def __init__(self, layers: Sequence[Any], reads: Reads) -> None:
        super().__init__(layers)
        self._reads = reads

    def __getitem__(self, index: Any) -> Any:
        if type(index) is LayerIndex:
            return super().__getitem__(index.value)
        self._reads.found.append(f"a layer of the cache ({index!r})")
        return super().__getitem__(operator.index(index) if not isinstance(index, slice) else index)

    def __iter__(self) -> Any:
        self._reads.found.append("all layers of the cache")
        return super().__iter__()


def indices_of(tables: Iterable[Sequence[dict[str, Any]]]) -> list[dict[tuple[int, str], int]]:
    """Returns, for each layer of a list, its attributes that count the layers.

    They are ints that are the layer's place in the list, plus a number that is the same for all layers.

    Args:
        tables: Attributes of the parts of each layer, in the same order.

    Returns:
        By layer, the index by number of the part and name of the attribute.
    """
    ints = [
        {
            (number, name): value
            for number, table in enumerate(parts)
            for name, value in table.items()
            if type(value) is int
        }
        for parts in tables
    ]
    offsets: dict[tuple[int, str], set[int]] = {}
    counts: dict[tuple[int, str], int] = {}
    for place, found in enumerate(ints):
        for key, value in found.items():
            offsets.setdefault(key, set()).add(value - place)
            counts[key] = counts.get(key, 0) + 1
    counting = {key for key, values in offsets.items() if len(values) == 1 and counts[key] > 1}
    return [{key: value for key, value in found.items() if key in counting} for found in ints]
