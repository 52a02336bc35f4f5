"""Weights as they lie in memory, in one file that a later start maps instead of reading.

The file is in safetensors format, with every tensor at a multiple of 64 bytes, so that XLA takes it where it lies. It
belongs to the cache: the checkpoint's own files may be overwritten in place while they are mapped.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from model_adapters.device_arrays import XLA_CPU_ALIGNMENT
from model_adapters.ops.compressed_weight import Weight, Weights

_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Names of dtypes in safetensors."""


class NotStorableError(Exception):
    """A weight that the file cannot hold."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of an array in the file.

    Attributes:
        offset: First byte.
        shape: Shape of the array.
        dtype: Name of the dtype in safetensors.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * _DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class WeightPlaces:
    """The weights of a model by their places.

    Attributes:
        weights: Each weight once, with a `Place` for each of its arrays.
        names: Index in `weights` by qualified name; tied names share one.
        num_bytes: Size of the file without its seal.
    """

    weights: tuple[Any, ...]
    names: dict[str, int]
    num_bytes: int


def stored(weights: Weights) -> tuple[WeightPlaces, Iterator[bytes | memoryview]]:
    """Returns the places of `weights`, and the content of the file, piece by piece.

    Args:
        weights: Weights by qualified name, on one CPU device.

    Raises:
        NotStorableError: a dtype that safetensors do not have.
    """
    unique = {id(weight): weight for weight in weights.values()}
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(list(unique.values()))}  # an array may be part of two weights
    arrays = {key: np.asarray(leaf) for key, leaf in leaves.items()}
    header, places = _header(list(arrays.values()))
    place_of = dict(zip(arrays, places, strict=True))
    placed = tuple(jax.tree.map(lambda leaf: place_of[id(leaf)], weight) for weight in unique.values())
    index = {key: number for number, key in enumerate(unique)}
    num_bytes = len(header) + sum(_padded(array.nbytes) for array in arrays.values())
    names = {name: index[id(weight)] for name, weight in weights.items()}
    return WeightPlaces(placed, names, num_bytes), _pieces(header, list(arrays.values()))


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % XLA_CPU_ALIGNMENT


def _header(arrays: Sequence[np.ndarray]) -> tuple[bytes, list[Place]]:
    """Returns the header of the file, padded, and the place of each array.

    The format allows no holes: what fills up the last 64 bytes of an array is a tensor, too.
    """
    entries: dict[str, Any] = {}
    places, end = [], 0
    for number, array in enumerate(arrays):
        places.append(Place(end, array.shape, _name_of(array.dtype)))
        entries[str(number)] = _entry(places[-1].dtype, array.shape, end, end + array.nbytes)
        end += array.nbytes
        if padding := _padded(end) - end:
            entries[f"padding.{number}"] = _entry("U8", (padding,), end, end + padding)
            end += padding
    text = json.dumps(entries).encode()
    text += b" " * (_padded(len(text) + 8) - len(text) - 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [dataclasses.replace(place, offset=len(header) + place.offset) for place in places]


def _name_of(dtype: np.dtype) -> str:
    for name, each in _DTYPES.items():
        if each == dtype:
            return name
    raise NotStorableError(f"a weight in {dtype}")


def _entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _pieces(header: bytes, arrays: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    yield header
    for array in arrays:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        yield b"\0" * (_padded(array.nbytes) - array.nbytes)


def mapped(path: Path, places: WeightPlaces) -> tuple[dict[str, Weight], np.ndarray]:
    """Returns the weights by name, over the mapped file, and its content, uint8[n].

    Raises:
        OSError: the file cannot be mapped, or is too short.
    """
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(memory) < places.num_bytes:
        raise OSError(f"{path} is too short")
    content = np.frombuffer(memory, np.uint8)
    device = jax.local_devices()[0]
    made: dict[Place, jax.Array] = {}

    def array_of(place: Place) -> jax.Array:
        if place not in made:
            taken = content[place.offset : place.offset + place.num_bytes]
            array = taken.view(_DTYPES[place.dtype]).reshape(place.shape)
            made[place] = jax.device_put(array, device, may_alias=True)
        return made[place]

    weights = [jax.tree.map(array_of, each, is_leaf=lambda x: isinstance(x, Place)) for each in places.weights]
    return {name: weights[index] for name, index in places.names.items()}, content
