"""What programs of a model that is an object depend on, as a text.

Every attribute of every part is in it, and the class of each. What cannot be described makes an object one of its own:
a class or function from anywhere but an installed library, hooks, an attribute of an unknown kind.
"""

import enum
import functools
import hashlib
import sys
import types

import jax
import torch
from transformers import PreTrainedConfig

from model_adapters.program.module_watch import NOT_READ

LIBRARIES = ("torch", "transformers")


class UndescribedError(Exception):
    """An attribute of a kind that no description tells from another."""


def identity_of(loaded):
    """Returns a digest of everything that programs of a loaded model depend on; None if it cannot be told."""
    if loaded.source.kind != "object":
        return None
    try:
        module = loaded.module
        parts = [f"{name} {_name_of(type(child))} {_attributes(child)}" for name, child in module.named_modules()]
        tensors = {name: _tensor(each) for name, each in (*module.named_buffers(), *_scalars(module))}
        weights = [f"{name} {_weight(loaded.weights[name])}" for name in sorted(loaded.weights)]
    except UndescribedError:
        return None
    settings = [torch.get_default_dtype(), torch.is_grad_enabled()]
    described = "\n".join([*parts, f"{tensors}", *weights, _described(vars(loaded.config)), f"{settings}"])
    return hashlib.sha256(described.encode()).hexdigest()


def _scalars(module):
    return [(name, each) for name, each in module.named_parameters() if each.ndim == 0]


def _weight(weight):
    """Describes a weight as the product's own identity of a model does."""
    shapes = [f"{part.shape} {part.dtype}" for part in jax.tree.leaves(weight)]
    return f"{type(weight).__name__} {shapes} {getattr(weight, 'scheme', '')}"


def _tensor(value):
    if value.is_meta or isinstance(value, torch.nn.Parameter):
        return f"{value.shape} {value.stride()} {value.dtype}"
    return hashlib.sha256(f"{value.dtype} {value.tolist()}".encode()).hexdigest()


def _attributes(module):
    """Describes the attributes of a part, and the shapes of its tensors; its parts are described beside it."""
    values = dict(vars(module))
    parts, hooks = values.pop("_modules"), [values.pop(name) for name in list(values) if name.endswith("_hooks")]
    if any(hooks):
        raise UndescribedError
    names = {name: _name_of(type(part)) for name, part in parts.items()}
    return f"{names} {_described({name: value for name, value in values.items() if name not in NOT_READ})}"


def _described(value):
    """Returns a text that is equal for values that model code cannot tell apart."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, dict):
        items = [f"{_described(key)}: {_described(each)}" for key, each in value.items()]
        return f"{type(value).__name__} {items}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[_described(each) for each in value]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(_described, value))}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | enum.Enum):
        return _name_of(value)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
        return f"method {_name_of(value.__func__)}"
    if isinstance(value, functools.partial):
        return f"partial {_described(value.func)} {_described(value.args)} {_described(value.keywords)}"
    if isinstance(value, PreTrainedConfig):
        return f"{_name_of(type(value))} {_described(vars(value))}"
    raise UndescribedError


def _name_of(value):
    """Returns the name under which an installed library has a class or function."""
    if isinstance(value, enum.Enum):
        return f"{_name_of(type(value))}.{value.name}"
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if module.partition(".")[0] not in LIBRARIES or module not in sys.modules:
        raise UndescribedError
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules[module])
    except AttributeError as error:  # made within a function
        raise UndescribedError from error
    if found is not value:
        raise UndescribedError
    return f"{module}.{name}"
