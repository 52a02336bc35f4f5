"""The settings of a model's configuration, its module, torch and JAX during a trace."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, pytorch_utils

from model_adapters.jax_settings import jax_promotion

# A trace changes the module and its configuration for as long as it lasts, and a load what PyTorch and transformers
# have for the whole process.
_TRACE_LOCK = threading.RLock()


@contextlib.contextmanager
def torch_promotion() -> Iterator[None]:
    """Applies torch code's rules for shapes and dtypes inside, whatever a script told JAX.

    Also leaves a script's ``torch.inference_mode``, in which operators such as ``layer_norm`` are not decomposed into
    those that have a lowering.
    """
    inference = torch.inference_mode(False), torch.no_grad()  # in this order: the first switches gradients on
    with inference[0], inference[1], jax_promotion():
        yield


def trace_lock() -> contextlib.AbstractContextManager[Any]:
    """Returns the lock (reentrant) held while a module is traced, loaded or built."""
    return _TRACE_LOCK


@contextlib.contextmanager
def config_overrides(module: PreTrainedModel, *, attention: str | None, experts: str) -> Iterator[None]:
    """Sets the implementations in every configuration of `module` inside the context.

    Afterwards the configurations are as before.

    Args:
        module: the model about to be traced.
        attention: name in transformers' attention interface; None leaves the models' own choice.
        experts: name in transformers' experts interface.
    """
    wanted = {"_experts_implementation_internal": experts}
    if attention is not None:
        wanted["_attn_implementation_internal"] = attention
    with _TRACE_LOCK:
        before = [
            (config, name, getattr(config, name))
            for config in configs_of(module)
            for name in wanted
            if hasattr(config, name)
        ]
        try:
            for config, name, _ in before:
                setattr(config, name, wanted[name])
            yield
        finally:
            for config, name, value in before:
                setattr(config, name, value)


def configs_of(module: torch.nn.Module) -> list[Any]:
    """Returns each configuration that a part of `module` reads, once."""
    of_parts = [child.config for child in module.modules() if hasattr(child, "config")]
    found = {id(config): config for config in of_parts if hasattr(config, "__dict__")}  # no dict, as of other libraries
    for config in list(found.values()):
        for part in getattr(config, "sub_configs", {}):
            if (sub := getattr(config, part, None)) is not None:
                found[id(sub)] = sub
    return list(found.values())


@contextlib.contextmanager
def restored_attributes(module: torch.nn.Module) -> Iterator[list[str]]:
    """Removes tensors that `module` and its parts were given inside the context.

    Those in dicts of theirs, too. Yields their names, known at the end. Traced tensors mean nothing after the trace.
    """
    before = {child: dict(vars(child)) for child in module.modules()}
    dicts = {child: {name: dict(each) for name, each in _own_dicts(child)} for child in module.modules()}
    written: list[str] = []
    try:
        yield written
    finally:
        for name, child in module.named_modules():
            for attribute, value in list(vars(child).items()):
                was = before.get(child, {}).get(attribute)  # code may exchange modules, too
                if isinstance(value, torch.Tensor) and was is not value:
                    written.append(f"{name}.{attribute}")
                    vars(child)[attribute] = was
            for attribute, memo in _own_dicts(child):
                known = dicts.get(child, {}).get(attribute, {})
                for key in [key for key, value in memo.items() if isinstance(value, torch.Tensor)]:
                    if memo[key] is not known.get(key):
                        memo.pop(key)
                memo.update({key: known[key] for key in known.keys() - memo.keys()})


def _own_dicts(module: torch.nn.Module) -> list[tuple[str, dict[Any, Any]]]:
    """Returns the dicts that code of `module` has made, by attribute.

    Those that PyTorch keeps of every module are left out.
    """
    found = ((name, value) for name, value in vars(module).items() if type(value) is dict)
    return [(name, value) for name, value in found if name not in _OF_EVERY_MODULE]


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


@contextlib.contextmanager
def without_memos() -> Iterator[None]:
    """Lets methods that transformers memoizes compute anew inside, under the lock of a trace.

    Their results would be traced tensors, of which later traces and PyTorch can make nothing. It is what they do under
    ``torch.compile``.
    """
    before = pytorch_utils.is_torchdynamo_compiling
    pytorch_utils.is_torchdynamo_compiling = lambda: True
    try:
        yield
    finally:
        pytorch_utils.is_torchdynamo_compiling = before


@contextlib.contextmanager
def replaced_methods(replacements: Iterable[tuple[torch.nn.Module, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replaces methods inside the context.

    Each of `replacements` is a module, the name of its method, and the function.
    """
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    try:
        for module, method, function in replacements:
            changed.append((module, method, vars(module).get(method)))
            vars(module)[method] = types.MethodType(function, module)
        yield
    finally:
        for module, method, before in reversed(changed):
            vars(module).pop(method, None)
            if before is not None:
                vars(module)[method] = before


def same_code(kind: type, other: type, method: str) -> bool:
    """Tells whether two classes have a method of the same code, to the last instruction."""
    return _code(kind, method) == _code(other, method) is not None


def _code(kind: type, method: str) -> tuple[Any, ...] | None:
    """Returns the bytecode, names and constants of a method, which determine its result.

    None if there is no such method. The values of its global names are not compared, and the docstring is ignored.
    """
    code = getattr(getattr(kind, method, None), "__code__", None)
    if code is None:
        return None
    return code.co_code, code.co_names, tuple(const for const in code.co_consts if not isinstance(const, str))
