"""The weight files of a model folder: their names, entries and lazy readers of tensors.

A reader represents one tensor and reads it when transformers' loader asks for it, with ``pread`` into a fresh buffer
that starts at 64 bytes. Nothing is memory-mapped: mapped pages count as resident memory of the process, and a JAX array
can then take the buffer over without a copy.

The layout of a safetensors file (8 bytes header length, JSON header, data) is as its specification has it; the library
itself validates every file before a byte of data is read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from model_adapters.errors import CheckpointError
from model_adapters.loading.file_names import inside
from model_adapters.loading.progress import Advance

logger = logging.getLogger("torchax_serve")

SAFE_FILE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_FILE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.uint8,  # two numbers in a byte
}

_CHUNK_BYTES = 8 * 2**20
_NUM_READ_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int


def _corrupt(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} is corrupt: {reason}; get the file again")


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Returns the JSON header of a safetensors file and the offset of its data.

    Raises `CheckpointError`.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise CheckpointError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if len(start) < 8 or length > size - 8:
                raise CheckpointError(
                    f"{file} is truncated or corrupt: {size} bytes, its header says {8 + length}; get the file again"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _corrupt(file, "its header is not a JSON object")
    return header, 8 + length


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of a safetensors file, by name, without reading their data.

    Raises `CheckpointError`.
    """
    header, data_start = _header(file)
    ends = [
        value["data_offsets"][1]
        for value in header.values()
        if isinstance(value, dict) and isinstance(value.get("data_offsets"), list) and len(value["data_offsets"]) == 2
    ]
    expected = data_start + max((end for end in ends if isinstance(end, int)), default=0)
    size = file.stat().st_size
    if size < expected:
        raise CheckpointError(f"{file} is truncated: {expected} bytes expected, {size} there; get the file again")
    try:
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise _corrupt(file, str(error)) from error
    entries = {}
    for name in names:
        description = header[name]
        if description["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} of {file} has dtype {description['dtype']}, expected one of {', '.join(_DTYPES)}: "
                "use another checkpoint of this model"
            )
        start, end = description["data_offsets"]
        shape = tuple(description["shape"])
        if description["dtype"] == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        entries[name] = TensorEntry(name, _DTYPES[description["dtype"]], shape, file, data_start + start, end - start)
    return entries


def weight_files(folder: Path, *, explicit: str | None, extra: tuple[str, ...], allow_pickle: bool) -> list[Path]:
    """Returns the files with the weights of the model in `folder`.

    Raises `CheckpointError` if some are missing.

    Args:
        folder: the model's folder.
        explicit: the file that ``config.transformers_weights`` names in place of the usual ones.
        extra: further files of the model's class, taken where present.
        allow_pickle: whether files that ``torch.load`` unpickles (tensors only) are accepted where there is no
            safetensors file.
    """
    candidates = [inside(explicit, folder / "config.json")] if explicit else [SAFE_FILE, SAFE_INDEX]
    if allow_pickle and not explicit:
        candidates += [PICKLE_FILE, PICKLE_INDEX]
    for name in candidates:
        if (folder / name).is_file():
            files = shards_of(folder / name) if name.endswith(".index.json") else [folder / name]
            return files + [folder / more for more in extra if (folder / more).is_file()]
    if any((folder / name).is_file() for name in (PICKLE_FILE, PICKLE_INDEX)):
        raise pickle_only(str(folder))
    there = sorted(path.name for path in folder.iterdir() if path.is_file())
    listed = ", ".join(there[:12]) + (" …" if len(there) > 12 else "")
    raise CheckpointError(
        f"{folder} holds no weights: expected {' or '.join(candidates)}, found {listed or 'nothing'}{dangling(folder)}"
    )


def dangling(folder: Path) -> str:
    """Returns a note on links in `folder`, as in a hub cache, to missing files; else empty."""
    gone = sorted(path.name for path in folder.iterdir() if path.is_symlink() and not path.exists())
    return f"; {', '.join(gone[:3])} links to a file that is gone: download the model again" if gone else ""


def pickle_only(where: str) -> CheckpointError:
    """Returns the error for a checkpoint that has only pickle files."""
    return CheckpointError(
        f"the weights of {where} are pickle files ({PICKLE_FILE}), which can carry code: "
        "pass allow_pickle=True to load their tensors all the same, or convert them to safetensors"
    )


def shard_names(index: Path) -> list[str]:
    """Returns the files that an index names, in order.

    Raises `CheckpointError` if the file is not an index.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is not an index of weight files (expected JSON with a weight_map): get the file again"
        ) from error
    if not names or any(not isinstance(name, str) or Path(name).name != name or name == ".." for name in names):
        raise CheckpointError(f"{index} names no weight files of its own folder: get the file again")
    return names


def shards_of(index: Path) -> list[Path]:
    """Returns the files that an index names; raises `CheckpointError` naming missing ones."""
    names = shard_names(index)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of the {len(names)} weight files that {index.name} names: "
            f"{', '.join(missing[:3])}{more}; get the missing files"
        )
    return [index.parent / name for name in names]


class SafetensorsReader:
    """Reader of one tensor by ``reader[...]``.

    It has the methods of safetensors' slices that transformers uses.
    """

    def __init__(self, entry: TensorEntry, descriptor: int, pool: ThreadPoolExecutor, advance: Advance) -> None:
        self._entry, self._descriptor, self._pool, self._advance = entry, descriptor, pool, advance

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self._entry.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in the file."""
        return self._entry.dtype

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        if index is not Ellipsis:
            raise TypeError(f"a tensor of a checkpoint is read whole, with [...]; got [{index!r}]")
        # bytes first and the view after: torch starts every buffer of its own at 64 bytes
        buffer = torch.empty(self._entry.num_bytes, dtype=torch.uint8)
        if self._entry.num_bytes:
            target = memoryview(buffer.numpy())  # type: ignore[arg-type]
            starts = range(0, self._entry.num_bytes, _CHUNK_BYTES)
            if len(starts) == 1:
                self._read(target, 0)
            else:
                list(self._pool.map(lambda start: self._read(target, start), starts))
        return buffer.view(self._entry.dtype).view(self._entry.shape)

    def _read(self, target: memoryview, start: int) -> None:
        end = min(start + _CHUNK_BYTES, self._entry.num_bytes)
        done = start
        while done < end:
            try:
                num_read = os.preadv(self._descriptor, [target[done:end]], self._entry.offset + done)
            except OSError as error:
                raise CheckpointError(f"{self._entry.file} cannot be read: {error.strerror or error}") from error
            if num_read == 0:
                raise CheckpointError(
                    f"{self._entry.file} ends within tensor {self._entry.name!r}: it was cut while being read"
                )
            done += num_read
        self._advance(end - start)


class PickledReader:
    """Reader of one tensor of a pickle file; ``reader[...]`` copies it from the mapped file."""

    def __init__(self, tensor: torch.Tensor, advance: Advance) -> None:
        self._tensor, self._advance = tensor, advance

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in the file."""
        return self._tensor.dtype

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        if index is not Ellipsis:
            raise TypeError(f"a tensor of a checkpoint is read whole, with [...]; got [{index!r}]")
        self._advance(self._tensor.numel() * self._tensor.element_size())
        return self._tensor.detach().clone(memory_format=torch.contiguous_format)


TensorReader = SafetensorsReader | PickledReader


def _pickled_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files older than torch 1.6 are no zip archives and cannot be mapped
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a damaged file raises whatever its bytes spell
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{file} cannot be unpickled as tensors ({reason}): get the file again, or convert it to safetensors"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{file} is not a flat mapping of names to tensors: save `model.state_dict()` alone")
    return dict(state)


@dataclass(frozen=True)
class Checkpoint:
    """Weight files and the tensors they hold."""

    files: tuple[Path, ...]
    entries: Mapping[str, TensorEntry | torch.Tensor]

    @classmethod
    def of(cls, files: list[Path]) -> Checkpoint:
        """Reads the headers of `files`.

        Of a tensor that two files hold the later one counts, as in transformers, and one line is logged.

        Raises:
            CheckpointError: a damaged file, or no tensor at all.
        """
        entries: dict[str, TensorEntry | torch.Tensor] = {}
        for file in files:
            found: Mapping[str, TensorEntry | torch.Tensor]
            found = read_entries(file) if file.suffix == ".safetensors" else _pickled_tensors(file)
            twice = sorted(entries.keys() & found.keys())
            if twice:
                more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
                logger.warning(
                    "%s holds %s%s, which an earlier file of this checkpoint holds as well: the later one counts",
                    file,
                    twice[0],
                    more,
                )
            entries.update(found)
        if not entries:
            raise CheckpointError(f"{', '.join(map(str, files))}: not one tensor in it")
        return cls(tuple(files), entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(self.sizes_in(None).values())

    def sizes_in(self, dtype: torch.dtype | None) -> dict[str, int]:
        """Returns the bytes of each tensor with its floating-point numbers in `dtype`.

        With None they are as in the file.
        """
        return {
            name: math.prod(entry.shape)
            * (dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype).itemsize
            for name, entry in self.entries.items()
        }

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor: transformers' rule if the config names none."""
        return next((entry.dtype for entry in self.entries.values() if entry.dtype.is_floating_point), None)

    @contextlib.contextmanager
    def readers(self, advance: Advance) -> Iterator[dict[str, TensorReader]]:
        """Yields a lazy reader for each tensor, by name.

        `advance` gets the bytes as they are read. All files are closed at the end of the context.
        """
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(_NUM_READ_THREADS, thread_name_prefix="weights"))
            descriptors: dict[Path, int] = {}
            for file in self.files:
                if file.suffix == ".safetensors":
                    descriptors[file] = os.open(file, os.O_RDONLY)
                    stack.callback(os.close, descriptors[file])
            # the last entered is the first left: a Ctrl-C drops queued reads before the files are closed
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            yield {
                name: PickledReader(entry, advance)
                if isinstance(entry, torch.Tensor)
                else SafetensorsReader(entry, descriptors[entry.file], pool, advance)
                for name, entry in self.entries.items()
            }
