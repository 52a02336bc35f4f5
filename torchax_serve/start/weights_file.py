"""Weights as they lie in memory, in files that are read into huge pages at once.

What a checkpoint's own safetensors have bit for bit is read from there. The rest (packed weights, tensors that were
converted or computed) is in one file of the cache, in safetensors format with every tensor at a multiple of 64 bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from model_adapters.device_arrays import XLA_CPU_ALIGNMENT
from model_adapters.ops.compressed_weight import Weight, Weights
from model_adapters.ops.cpu.huge_pages import HugePages

READ_BYTES = 32 << 20
"""Bytes of one read: pieces of this size keep several threads busy to the end."""
OWN_FILE = 0
"""Number of the cache's own file among those of `StoredWeights.files`; the checkpoint's follow."""
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
}
"""Names of dtypes in safetensors."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of an array's bytes.

    Attributes:
        file: Number of the file.
        offset: First byte in the file.
        shape: Shape of the array.
        dtype: Name of the dtype in safetensors.
    """

    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * _DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """The weights of a model by their places.

    Attributes:
        weights: Each weight once, with a `Place` for each of its arrays.
        names: Index in `weights` by qualified name; tied names share one.
        checkpoint_files: Names of the checkpoint's files that places refer to.
    """

    weights: tuple[Any, ...]
    names: dict[str, int]
    checkpoint_files: tuple[str, ...]


class NotStorableError(Exception):
    """A weight that these files cannot hold."""


def placed(weights: Weights, folder: Path) -> tuple[StoredWeights, Iterator[bytes | memoryview]]:
    """Returns the places of `weights`, and the content of the cache's own file, piece by piece.

    Args:
        weights: Weights by qualified name, on one CPU device.
        folder: Folder with the checkpoint's safetensors.

    Raises:
        NotStorableError: a dtype that safetensors do not have.
    """
    files = sorted(folder.glob("*.safetensors"))
    known = {name: place for number, file in enumerate(files, 1) for name, place in _entries(file, number)}
    contents = [np.memmap(file, np.uint8, "r") for file in files]
    names_of: dict[int, list[str]] = {}
    for name, weight in weights.items():
        names_of.setdefault(id(weight), []).append(name)
    own: list[np.ndarray] = []
    places: list[Any] = []

    def place(leaf: Any, names: Sequence[str]) -> Place:
        array = np.asarray(leaf)
        for name in names:
            found = known.get(name)
            if found is not None and _is_equal(array, found, contents[found.file - 1]):
                return found
        own.append(array)
        return Place(OWN_FILE, len(own) - 1, array.shape, _name_of(array.dtype))  # its number, until offsets are known

    for names in names_of.values():
        places.append(jax.tree.map(lambda leaf, names=names: place(leaf, names), weights[names[0]]))
    header, offsets = _header(own)

    def with_offset(each: Place) -> Place:
        return dataclasses.replace(each, offset=offsets[each.offset]) if each.file == OWN_FILE else each

    stored = tuple(jax.tree.map(with_offset, each, is_leaf=lambda x: isinstance(x, Place)) for each in places)
    index = {name: number for number, names in enumerate(names_of.values()) for name in names}
    return StoredWeights(stored, index, tuple(file.name for file in files)), _pieces(header, own)


def _name_of(dtype: np.dtype) -> str:
    for name, each in _DTYPES.items():
        if each == dtype:
            return name
    raise NotStorableError(f"a weight in {dtype}")


def _entries(file: Path, number: int) -> Iterator[tuple[str, Place]]:
    """Yields names and places of the tensors in a safetensors file."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in _DTYPES:
            yield name, Place(number, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])


def _is_equal(array: np.ndarray, place: Place, content: np.ndarray) -> bool:
    if array.shape != place.shape or array.dtype != _DTYPES[place.dtype]:
        return False
    return np.array_equal(_bytes_of(array), content[place.offset : place.offset + place.num_bytes])


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _header(arrays: Sequence[np.ndarray]) -> tuple[bytes, list[int]]:
    """Returns the header of a safetensors file, padded, and the offset of each array in the file.

    The format allows no holes: what fills up the last 64 bytes of an array is a tensor, too.
    """
    entries: dict[str, Any] = {}
    begins, end = [], 0
    for number, array in enumerate(arrays):
        begins.append(end)
        entries[str(number)] = _entry(_name_of(array.dtype), array.shape, end, end + array.nbytes)
        end += array.nbytes
        if padding := -end % XLA_CPU_ALIGNMENT:
            entries[f"padding.{number}"] = _entry("U8", (padding,), end, end + padding)
            end += padding
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % XLA_CPU_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + begin for begin in begins]


def _entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _pieces(header: bytes, arrays: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    yield header
    for array in arrays:
        yield _bytes_of(array).data
        yield b"\0" * (-array.nbytes % XLA_CPU_ALIGNMENT)


class WeightsReader:
    """Reads weights on threads of its own, from the moment it is made.

    Args:
        stored: Places of the weights.
        files: The cache's own file and those of the checkpoint, as places number them.
    """

    def __init__(self, stored: StoredWeights, files: Sequence[Path]) -> None:
        self._stored = stored
        places = dict.fromkeys(each for weight in stored.weights for each in _places(weight))
        memory = HugePages(sum(place.num_bytes + XLA_CPU_ALIGNMENT for place in places))
        self._memory = {place: memory.take(place.num_bytes) for place in places}
        self._threads = ThreadPoolExecutor(os.cpu_count(), "read-weights")
        self._reads = [
            self._threads.submit(_read, files[place.file], place.offset + begin, taken[begin : begin + READ_BYTES])
            for place, taken in self._memory.items()
            for begin in range(0, len(taken), READ_BYTES)
        ]

    def arrays(self) -> dict[str, Weight]:
        """Returns the weights by name, once they are read.

        Raises:
            OSError: a file cannot be read, or ends too early.
        """
        for read in self._reads:
            read.result()
        self._threads.shutdown()
        device = jax.local_devices()[0]

        def array_of(place: Place) -> jax.Array:
            content = self._memory[place].view(_DTYPES[place.dtype]).reshape(place.shape)
            return jax.device_put(content, device, may_alias=True)

        made = [jax.tree.map(array_of, each, is_leaf=lambda x: isinstance(x, Place)) for each in self._stored.weights]
        return {name: made[index] for name, index in self._stored.names.items()}


def _places(weight: Any) -> list[Place]:
    return jax.tree.leaves(weight, is_leaf=lambda x: isinstance(x, Place))


def _read(file: Path, offset: int, taken: np.ndarray) -> None:
    """Fills `taken` uint8[n] with the bytes of `file` from `offset` on."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        view = memoryview(taken)
        while view:
            done = os.preadv(descriptor, [view], offset)
            if done == 0:
                raise OSError(f"{file} ends too early")
            view, offset = view[done:], offset + done
    finally:
        os.close(descriptor)


def bytes_on_disk(stored: StoredWeights, weights: Mapping[str, Weight]) -> int:
    """Returns the bytes of the cache's own file."""
    places = {each for weight in stored.weights for each in _places(weight)}
    return sum(place.num_bytes for place in places if place.file == OWN_FILE)
