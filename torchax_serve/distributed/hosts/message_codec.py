"""Messages between hosts as JSON and raw arrays: what comes out is data, whatever was sent.

Pickle would run what a peer names. Here a peer can name dataclasses and enumerations of this project alone, which are
made from their fields, and classes of outputs that this process has already loaded.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import importlib
import json
import struct
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from transformers.utils import ModelOutput

from model_adapters.errors import UnsupportedArgumentError

PACKAGES = ("torchax_serve", "model_adapters", "sharding_rules")
_HEAD = struct.Struct("!I")


class CodecError(ValueError):
    """What came is no message of this program."""


def encode(message: Any) -> bytes:
    """Returns a message of plain values, arrays of NumPy and dataclasses of this project as bytes.

    Raises:
        UnsupportedArgumentError: something in it has another type.
    """
    arrays: list[bytes] = []
    text = json.dumps(_packed(message, arrays)).encode()
    return b"".join([_HEAD.pack(len(text)), text, *arrays])


def decode(content: bytes) -> Any:
    """Returns the message.

    Raises:
        CodecError: it is none.
    """
    try:
        (length,) = _HEAD.unpack_from(content)
        end = _HEAD.size + length
        return _unpacked(json.loads(content[_HEAD.size : end]), memoryview(content)[end:])
    except (CodecError, MemoryError):
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise CodecError(f"what came is no message of this program ({type(error).__name__})") from error


def _packed(value: Any, arrays: list[bytes]) -> Any:
    """`value` for JSON: itself where that is enough, else a list that begins with its kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray):
        begin = sum(map(len, arrays))
        arrays.append(np.ascontiguousarray(value).tobytes())
        return ["array", value.dtype.name, list(value.shape), begin]
    if isinstance(value, np.generic):
        return ["number", value.dtype.name, _packed(value.item(), arrays)]
    if type(value) in (tuple, list):
        return [type(value).__name__, *(_packed(each, arrays) for each in value)]
    if type(value) is dict:
        return ["dict", *([_packed(key, arrays), _packed(each, arrays)] for key, each in value.items())]
    if type(value) is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, np.dtype):
        return ["dtype", value.name]
    if isinstance(value, torch.dtype):
        return ["torch dtype", str(value).removeprefix("torch.")]
    if isinstance(value, enum.Enum):
        return ["enum", _name_of(type(value)), value.name]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return ["object", _name_of(type(value)), {name: _packed(getattr(value, name), arrays) for name in fields}]
    if isinstance(value, type) and issubclass(value, ModelOutput):
        return ["output", value.__module__, value.__qualname__]
    raise UnsupportedArgumentError(
        f"expected arguments that other hosts can be sent, got {type(value).__module__}.{type(value).__qualname__}; "
        "leave it out, or run on one host"
    )


def _unpacked(value: Any, arrays: memoryview) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    return _READERS[kind](parts, arrays)


def _read_array(parts: list[Any], arrays: memoryview) -> np.ndarray:
    name, shape, begin = parts
    dtype = jnp.dtype(name)
    num_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if begin < 0 or any(size < 0 for size in shape) or begin + num_bytes > len(arrays):
        raise CodecError("what came is no message of this program (an array beyond its end)")
    return np.frombuffer(arrays[begin : begin + num_bytes], dtype).reshape(shape).copy()


def _read_dict(parts: list[Any], arrays: memoryview) -> dict[Any, Any]:
    return {_unpacked(key, arrays): _unpacked(each, arrays) for key, each in parts}


def _read_object(parts: list[Any], arrays: memoryview) -> Any:
    name, fields = parts
    made = _class_of(name)
    if not dataclasses.is_dataclass(made):
        raise CodecError(f"what came is no message of this program ({name} is no dataclass)")
    return made(**{field: _unpacked(each, arrays) for field, each in fields.items()})


def _read_enum(parts: list[Any], arrays: memoryview) -> Any:
    name, member = parts
    made = _class_of(name)
    if not issubclass(made, enum.Enum):
        raise CodecError(f"what came is no message of this program ({name} is no enumeration)")
    return made[member]


def _read_output(parts: list[Any], arrays: memoryview) -> type:
    module, name = parts
    found = getattr(sys.modules.get(module), name, None)
    if not (isinstance(found, type) and issubclass(found, ModelOutput)):
        raise CodecError(f"what came is no message of this program ({module}.{name} is no class of outputs here)")
    return found


def _read_torch_dtype(parts: list[Any], arrays: memoryview) -> torch.dtype:
    found = getattr(torch, parts[0])
    if not isinstance(found, torch.dtype):
        raise CodecError("what came is no message of this program (no dtype)")
    return found


_READERS: dict[str, Callable[[list[Any], memoryview], Any]] = {
    "array": _read_array,
    "number": lambda parts, arrays: jnp.dtype(parts[0]).type(_unpacked(parts[1], arrays)),
    "tuple": lambda parts, arrays: tuple(_unpacked(each, arrays) for each in parts),
    "list": lambda parts, arrays: [_unpacked(each, arrays) for each in parts],
    "dict": _read_dict,
    "bytes": lambda parts, arrays: base64.b64decode(parts[0], validate=True),
    "dtype": lambda parts, arrays: jnp.dtype(parts[0]),
    "torch dtype": _read_torch_dtype,
    "enum": _read_enum,
    "object": _read_object,
    "output": _read_output,
}


def _name_of(kind: type) -> str:
    if kind.__module__.partition(".")[0] not in PACKAGES or "." in kind.__qualname__:
        raise UnsupportedArgumentError(
            f"expected arguments that other hosts can be sent, got {kind.__module__}.{kind.__qualname__}; leave it "
            "out, or run on one host"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str) -> type:
    """A class of this project, by module and name."""
    module, _, qualname = name.partition(":")
    if module.partition(".")[0] not in PACKAGES or "." in qualname or "__main__" in module:
        raise CodecError(f"what came is no message of this program ({name})")
    try:
        found = getattr(importlib.import_module(module), qualname)
    except ImportError as error:
        raise CodecError(f"what came is no message of this program ({name})") from error
    if not isinstance(found, type) or found.__module__ != module:
        raise CodecError(f"what came is no message of this program ({name})")
    return found
