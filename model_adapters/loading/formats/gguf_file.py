"""The header of a GGUF file: metadata and a table of tensors.

The layout is that of ``docs/gguf.md`` of ggml (github.com/ggml-org/ggml), versions 2 and 3. The header is read here and
not by the package `gguf`, which takes seconds for a vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_adapters.errors import CheckpointError, UnsupportedModelError
from model_adapters.loading.formats.gguf_blocks import BLOCK_BYTES, TYPE_NAMES

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format of `struct` for each type of a value of fixed size."""

_MAX_NAME = 256  # characters of a tensor's name; ggml has 64
_MAX_AXES = 8  # of a tensor; ggml has 4
_MAX_DEPTH = 4  # of arrays in arrays


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file.

    Attributes:
        name: As in the file, such as "blk.0.attn_q.weight".
        type_name: ggml's name of its type, such as "Q4_K".
        shape: In the order of torch, columns last.
        offset: Bytes from the start of the file.
        num_bytes: Bytes in the file.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """What the header of a GGUF file says."""

    path: Path
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        """Architecture of the model, in the words of llama.cpp."""
        return str(self.metadata["general.architecture"])

    @property
    def num_layers(self) -> int:
        """Layers that have tensors, named ``blk.N.``; 0 where tensors have other names."""
        return len({name.split(".")[1] for name in self.tensors if name.startswith("blk.")})

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Reads the header of `path`.

        Raises:
            CheckpointError: not a GGUF file, or one that is cut, of version 1, big-endian or one of several parts.
            UnsupportedModelError: a tensor of a type that is not read, or a file without a language model.
        """
        try:
            with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).parse()
        except ValueError as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path} is not a GGUF file ({error}): get the file again") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size, self._at = path, data, len(data), 0

    def parse(self) -> GgufFile:
        magic = self._data[:4]
        if magic == b"vers":
            raise CheckpointError(f"{self._path} is a Git LFS pointer: run `git lfs pull` in its folder")
        if magic != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it starts with {magic!r}, expected {MAGIC!r}")
        self._at = 4
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self._path} is a big-endian GGUF file: get a little-endian one")
        if version not in (2, 3):
            raise CheckpointError(f"{self._path} is a GGUF file of version {version}, expected 2 or 3: convert it anew")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._number("I"), depth=0)
        self._check_is_complete(metadata)
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path}: expected general.alignment of 1 or more bytes, got {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {each.name: self._placed(each, start) for each in table}
        if len(tensors) < len(table):
            names = [each.name for each in table]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{self._path} is corrupt: it has tensor {twice} twice; get the file again")
        if not isinstance(metadata.get("general.architecture"), str) or not tensors:
            raise CheckpointError(f"{self._path} holds no model: expected general.architecture and tensors")
        return GgufFile(self._path, metadata, tensors)

    def _check_is_complete(self, metadata: dict[str, Any]) -> None:
        """Refuses a part of a model: one of several files, or the part for images."""
        parts = metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise UnsupportedModelError(
                f"{self._path} is one of {parts} parts: merge them (`llama-gguf-split --merge`) and give the result"
            )
        if metadata.get("general.type") == "mmproj" or metadata.get("general.architecture") == "clip":
            raise UnsupportedModelError(
                f"{self._path} is the image encoder (mmproj) of a model: give the file of the language model"
            )

    def _tensor(self) -> GgufTensor:
        name = self._string()
        if len(name) > _MAX_NAME:
            raise CheckpointError(
                f"{self._path} is corrupt: a tensor's name has {len(name)} characters, expected {_MAX_NAME} at most; "
                "get the file again"
            )
        num_axes = self._number("I")
        if num_axes > _MAX_AXES:
            raise CheckpointError(f"{self._path} is corrupt: tensor {name!r} has {num_axes} axes; get the file again")
        shape = tuple(self._number("Q") for _ in range(num_axes))[::-1]
        number = self._number("I")
        type_name = TYPE_NAMES.get(number, f"type {number}")
        if type_name not in BLOCK_BYTES:
            known = ", ".join(name for name in BLOCK_BYTES if name.startswith("Q"))
            raise UnsupportedModelError(
                f"tensor {name} of {self._path} is in {type_name}, which is not read: "
                f"use a file in one of {known}, such as Q4_K_M or Q8_0"
            )
        block, block_bytes = BLOCK_BYTES[type_name]
        if math.prod(shape) and shape[-1] % block:
            raise CheckpointError(
                f"{self._path} is corrupt: {name} {list(shape)} does not divide into blocks of {block}"
            )
        return GgufTensor(name, type_name, shape, self._number("Q"), math.prod(shape) // block * block_bytes)

    def _placed(self, tensor: GgufTensor, start: int) -> GgufTensor:
        end = start + tensor.offset + tensor.num_bytes
        if end > self._size:
            raise CheckpointError(
                f"{self._path} is truncated: {end} bytes expected for tensor {tensor.name}, {self._size} there; "
                "get the file again"
            )
        return GgufTensor(tensor.name, tensor.type_name, tensor.shape, start + tensor.offset, tensor.num_bytes)

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._number("I"), self._number("Q")
            if element in _NUMBERS:
                return list(struct.unpack(f"<{count}{_NUMBERS[element]}", self._take(count, _NUMBERS[element])))
            self._need(count)  # each element has at least one byte
            if depth == _MAX_DEPTH:
                raise CheckpointError(f"{self._path} is corrupt: arrays in arrays in its header; get the file again")
            return [self._value(element, depth + 1) for _ in range(count)]
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self._path} is corrupt: a value of type {kind} in its header; get the file again")
        return self._number(_NUMBERS[kind])

    def _string(self) -> str:
        length = self._number("Q")
        self._need(length)
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", errors="replace")

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(1, kind))[0]

    def _take(self, count: int, kind: str) -> bytes:
        num_bytes = count * struct.calcsize(f"<{kind}")
        self._need(num_bytes)
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def _need(self, num_bytes: int) -> None:
        if self._at + num_bytes > self._size:
            raise CheckpointError(
                f"{self._path} is truncated: its header needs {self._at + num_bytes} bytes, {self._size} are there; "
                "get the file again"
            )
