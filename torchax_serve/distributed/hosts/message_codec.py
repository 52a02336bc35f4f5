"""Codec of messages between hosts, as JSON and raw arrays.

Decoding returns data, whatever was sent. Pickle would run what a peer names. Here a peer can name dataclasses and
enumerations only of this project, which are made from their fields, and caches and outputs that this process itself has
registered as pytrees, which are made from their attributes.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import importlib
import json
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from transformers.utils import ModelOutput

import pytree_registry
from model_adapters.errors import UnsupportedArgumentError

PACKAGES = ("torchax_serve", "model_adapters", "sharding_rules")
_HEAD = struct.Struct("!I")


class CodecError(ValueError):
    """The bytes are no message of this program."""


def encode(message: Any) -> bytes:
    """Encodes a message of plain values, NumPy arrays and dataclasses of this project as bytes.

    Raises:
        UnsupportedArgumentError: A value in it has another type.
    """
    arrays: list[bytes] = []
    text = json.dumps(_serialized(message, arrays)).encode()
    return b"".join([_HEAD.pack(len(text)), text, *arrays])


def decode(content: bytes) -> Any:
    """Decodes a message.

    Raises:
        CodecError: The bytes are no message.
    """
    try:
        (length,) = _HEAD.unpack_from(content)
        end = _HEAD.size + length
        return _deserialized(json.loads(content[_HEAD.size : end]), memoryview(content)[end:])
    except (CodecError, MemoryError):
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, struct.error) as error:
        raise CodecError(f"what came is no message of this program ({type(error).__name__})") from error


def _serialized(value: Any, arrays: list[bytes]) -> Any:
    """Returns `value` for JSON: unchanged if JSON has its type, else a list.

    The list begins with the value's kind.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind: Any = type(value)
    if (fields := _fields_of(kind)) is not None:
        return ["object", fields.name, *(_serialized(getattr(value, name), arrays) for name in fields.names)]
    if isinstance(value, np.ndarray):
        begin = sum(map(len, arrays))
        arrays.append(np.ascontiguousarray(value).tobytes())
        return ["array", value.dtype.name, list(value.shape), begin]
    if isinstance(value, np.generic):
        return ["number", value.dtype.name, _serialized(value.item(), arrays)]
    if type(value) in (tuple, list, frozenset):
        return [type(value).__name__, *(_serialized(each, arrays) for each in value)]
    if type(value) is dict:
        return ["dict", *([_serialized(key, arrays), _serialized(each, arrays)] for key, each in value.items())]
    if type(value) is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, np.dtype):
        return ["dtype", value.name]
    if isinstance(value, torch.dtype):
        return ["torch dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["torch device", str(value)]
    if isinstance(value, enum.Enum):
        return ["enum", _name_of(type(value)), value.name]
    if pytree_registry.is_registered(type(value)):
        # Entries of an output are its attributes once more, the same objects; that has to stay so.
        attributes, items = vars(value), dict(value) if isinstance(value, OrderedDict) else {}
        others = {key: each for key, each in items.items() if attributes.get(key) is not each}
        sent = [attributes, list(items), others]
        return ["node", _registered_name(type(value)), *(_serialized(each, arrays) for each in sent)]
    if isinstance(value, type) and issubclass(value, ModelOutput):
        return ["output", value.__module__, value.__qualname__]
    raise UnsupportedArgumentError(
        f"expected arguments that other hosts can be sent, got {type(value).__module__}.{type(value).__qualname__}; "
        "leave it out, or run on one host"
    )


class _Fields(NamedTuple):
    """Dataclass of this project, and the fields it is built from."""

    made: type
    name: str
    names: tuple[str, ...]


@functools.cache
def _fields_of(kind: type) -> _Fields | None:
    """Returns the fields of a dataclass `kind`.

    None for other types, and for pytree nodes of transformers.
    """
    if not dataclasses.is_dataclass(kind) or pytree_registry.is_registered(kind):
        return None
    return _Fields(kind, _name_of(kind), tuple(field.name for field in dataclasses.fields(kind) if field.init))


def _deserialized(value: Any, arrays: memoryview) -> Any:
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
    return {_deserialized(key, arrays): _deserialized(each, arrays) for key, each in parts}


def _read_object(parts: list[Any], arrays: memoryview) -> Any:
    name, *values = parts
    fields = _fields_named(name)
    given = [_deserialized(each, arrays) for each in values]
    return fields.made(**dict(zip(fields.names, given, strict=True)))


@functools.cache
def _fields_named(name: str) -> _Fields:
    fields = _fields_of(_class_of(name))
    if fields is None:
        raise CodecError(f"what came is no message of this program ({name} is no dataclass)")
    return fields


def _read_node(parts: list[Any], arrays: memoryview) -> Any:
    name, *sent = parts
    made: Any = next((each for each in pytree_registry.registered_classes() if _registered_name(each) == name), None)
    if made is None:
        raise CodecError(f"what came is no message of this program ({name} is no pytree node here)")
    attributes, keys, others = (_deserialized(each, arrays) for each in sent)
    node = made.__new__(made)
    vars(node).update(attributes)
    for key in keys:
        OrderedDict.__setitem__(node, key, others[key] if key in others else attributes[key])
    return node


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
    "number": lambda parts, arrays: jnp.dtype(parts[0]).type(_deserialized(parts[1], arrays)),
    "tuple": lambda parts, arrays: tuple(_deserialized(each, arrays) for each in parts),
    "frozenset": lambda parts, arrays: frozenset(_deserialized(each, arrays) for each in parts),
    "list": lambda parts, arrays: [_deserialized(each, arrays) for each in parts],
    "dict": _read_dict,
    "bytes": lambda parts, arrays: base64.b64decode(parts[0], validate=True),
    "dtype": lambda parts, arrays: jnp.dtype(parts[0]),
    "torch dtype": _read_torch_dtype,
    "torch device": lambda parts, arrays: torch.device(parts[0]),
    "enum": _read_enum,
    "node": _read_node,
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


def _registered_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str) -> type:
    """Returns a class of this project by module and name."""
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
