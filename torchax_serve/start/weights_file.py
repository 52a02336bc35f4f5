"""Weights as they lie in memory, in one file that a later start maps instead of reading.

The file is in safetensors format, with every tensor at a multiple of 64 bytes, so that XLA takes it where it lies. It
is nobody else's: a checkpoint's own files may be overwritten in place while they are mapped.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding, SingleDeviceSharding

from model_adapters.device_arrays import XLA_CPU_ALIGNMENT
from model_adapters.ops.compressed_weight import Weight, Weights
from model_adapters.ops.memory_layout import put

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


TensorNames = Mapping[str, Any]
"""Weights by qualified name, each with the name of a tensor in the place of each of its arrays."""

PADDING = ":padding:"
"""Beginning of the names of tensors that only fill up the file."""


def named_tensors(weights: Weights) -> tuple[TensorNames, dict[str, jax.Array]]:
    """Returns the names of the arrays of `weights`, and the arrays by name, each once.

    An array is named after the first weight that it is part of: ``lm_head.weight``, ``lm_head.weight:scale``.

    Args:
        weights: Weights by qualified name; tied ones share an array.
    """
    tensors: dict[str, jax.Array] = {}
    names: dict[int, str] = {}

    def name_of(weight_name: str, path: tuple[Any, ...], leaf: jax.Array) -> str:
        if id(leaf) not in names:
            names[id(leaf)] = ":".join([weight_name, *(part.name for part in path)])
            tensors[names[id(leaf)]] = leaf
        return names[id(leaf)]

    trees = {id(weight): name for name, weight in reversed(list(weights.items()))}
    found = {
        name: jax.tree_util.tree_map_with_path(lambda path, leaf, name=name: name_of(name, path, leaf), weights[name])
        for name in dict.fromkeys(trees[id(weight)] for weight in weights.values())
    }
    return {name: found[trees[id(weight)]] for name, weight in weights.items()}, tensors


def assembled(names: TensorNames, tensors: Mapping[str, Any]) -> dict[str, Weight]:
    """Returns the weights of `named_tensors` again; weights of the same tensors are one object.

    Args:
        names: Weights by qualified name, as names of tensors.
        tensors: Arrays by name.
    """
    made: dict[Any, Weight] = {}
    for tree in names.values():
        if tree not in made:
            made[tree] = jax.tree.map(lambda name: tensors[name], tree)
    return {name: made[tree] for name, tree in names.items()}


def file_of(tensors: Mapping[str, Any]) -> tuple[int, Iterator[bytes | memoryview]]:
    """Returns the number of bytes of the file of `tensors`, and its content, piece by piece.

    Args:
        tensors: Arrays by name, on one CPU device.

    Raises:
        NotStorableError: a dtype that safetensors do not have.
    """
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    header = _header(arrays)
    num_bytes = len(header) + sum(_padded(array.nbytes) for array in arrays.values())
    return num_bytes, _pieces(header, arrays)


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % XLA_CPU_ALIGNMENT


def _header(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns the header of the file, padded.

    The format allows no holes: what fills up the last 64 bytes of an array is a tensor, too.
    """
    entries: dict[str, Any] = {}
    end = 0
    for number, (name, array) in enumerate(arrays.items()):
        entries[name] = _entry(_name_of(array.dtype), array.shape, end, end + array.nbytes)
        end += array.nbytes
        if padding := _padded(end) - end:
            entries[f"{PADDING}{number}"] = _entry("U8", (padding,), end, end + padding)
            end += padding
    text = json.dumps(entries).encode()
    text += b" " * (_padded(len(text) + 8) - len(text) - 8)
    return len(text).to_bytes(8, "little") + text


def _name_of(dtype: np.dtype) -> str:
    for name, each in _DTYPES.items():
        if each == dtype:
            return name
    raise NotStorableError(f"a weight in {dtype}")


def _entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _pieces(header: bytes, arrays: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    yield header
    for array in arrays.values():
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        yield b"\0" * (_padded(array.nbytes) - array.nbytes)


def mapped(
    path: Path, names: TensorNames, place: Callable[[str], Sharding | Format] | None = None
) -> tuple[dict[str, Weight], np.ndarray]:
    """Returns the weights by name, over the mapped file, and its content, uint8[n].

    Args:
        path: The file.
        names: Weights by qualified name, as names of tensors.
        place: Says where the tensor of a name is to lie; None: on this process's first device.

    Raises:
        OSError: the file cannot be mapped, or is not the one that was written.
    """
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content = np.frombuffer(memory, np.uint8)
    begin = 8 + int.from_bytes(memory[:8], "little")
    try:
        entries = json.loads(memory[8:begin])
        ends = [entry["data_offsets"][1] for entry in entries.values()]
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise OSError(f"{path} has no header of safetensors") from error
    if len(memory) < begin + max(ends, default=0):
        raise OSError(f"{path} is too short")
    first_device = SingleDeviceSharding(jax.local_devices()[0])

    def array_of(name: str, entry: Mapping[str, Any]) -> jax.Array:
        first, end = entry["data_offsets"]
        array = content[begin + first : begin + end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return put(array, first_device if place is None else place(name), may_alias=True)

    tensors = {name: array_of(name, entry) for name, entry in entries.items() if not name.startswith(PADDING)}
    try:
        return assembled(names, tensors), content
    except LookupError as error:
        raise OSError(f"{path} lacks the tensor {error}") from error
