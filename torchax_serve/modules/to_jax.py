"""`module_to_jax`: a module whose methods run on JAX.

The class of the object is replaced by a subclass of itself, as `to_jax` does for models of transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from jax.sharding import Mesh

from model_adapters.bridge.host_arrays import check_floats
from model_adapters.bridge.views import in_torch_mode
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.once import once
from model_adapters.program.call_signature import TORCH_CLASS
from model_adapters.quantization.rules import parse_rules
from torchax_serve.modules.checks import check_module
from torchax_serve.modules.placement import runtime_on_mesh
from torchax_serve.modules.runtime import METHODS, ModuleRuntime
from torchax_serve.validation.library_objects import is_diffusers_module


def module_to_jax(
    module: torch.nn.Module,
    runtime: ModuleRuntime | None = None,
    *,
    quantization: Any = None,
    mesh: Mesh | None = None,
) -> torch.nn.Module:
    """Makes the forward of a module run on JAX and returns the module. Idempotent.

    Of a module of diffusers it is `METHODS`.

    Args:
        module: The module, of any library; it is set to evaluation.
        runtime: Runs its methods; None makes one of the module's own weights.
        quantization: Preset, file or list of rules; weights of linear layers are stored quantized.
        mesh: Devices that share the weights; None: one.

    Raises:
        InvalidArgumentError: it is on another device than the CPU, offloaded, compiled by ``torch.compile``, or has no
            forward.
        UnsupportedModelError: weights in float64, a quantized module, or a hook.
    """
    rules = parse_rules(quantization)
    if isinstance(module, JaxModuleMixin):
        if rules is not None:
            raise InvalidArgumentError(
                "quantization: expected a module in PyTorch, got one that runs on JAX already; make it anew"
            )
        return module
    name = type(module).__name__
    check_module(name, module)
    check_floats(module)
    is_diffusers = is_diffusers_module(module)
    if not methods_of(type(module), is_diffusers=is_diffusers):
        raise InvalidArgumentError(f"{name}: expected a module with a forward, got one without; write one")
    module.eval()
    if runtime is None:
        runtime = (
            runtime_on_mesh(module, mesh, rules)
            if mesh is not None
            else ModuleRuntime(module, is_diffusers=is_diffusers, rules=rules)
        )
    cls: Any = type(module)
    module.__class__ = _jax_class(cls, is_diffusers)
    vars(module)["_jax_runtime"] = runtime
    runtime.watch.take()
    return module


class JaxModuleMixin:
    """Mixin in front of a module's class; see `module_to_jax`."""

    _jax_runtime: ModuleRuntime

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedModelError(
            f"a {type(self).__name__} on JAX cannot be copied or pickled; copy it before to_jax, or save its state_dict"
        )


def methods_of(cls: type, *, is_diffusers: bool = True) -> list[str]:
    """Returns the names of `METHODS` that `cls` itself defines, torch's placeholder aside."""
    names = METHODS if is_diffusers else METHODS[:1]
    placeholder = torch.nn.Module.forward
    return [name for name in names if getattr(cls, name, None) not in (None, placeholder)]


@once
def _jax_class(cls: type, is_diffusers: bool) -> type:
    """Returns the subclass of `cls` with its name whose methods run on JAX."""
    namespace: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__, TORCH_CLASS: cls}
    names = methods_of(cls, is_diffusers=is_diffusers)
    namespace |= {name: _compiled(name, getattr(cls, name)) for name in names}
    return type(cls.__name__, (JaxModuleMixin, cls), namespace)


def _compiled(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if in_torch_mode():  # called by another method of the module, in a trace
            return own(self, *args, **kwargs)
        return self._jax_runtime.call(name, args, kwargs)

    return method


class _FunctionModule(torch.nn.Module):
    """A function as the forward of a module without weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__name__ = getattr(function, "__name__", "function")
        vars(self)["_function"] = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return vars(self)["_function"](*args, **kwargs)


def function_to_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of tensors that runs `function` on JAX, compiled by shapes.

    Raises:
        InvalidArgumentError: it reads a tensor or module that is no argument, whose later changes it would not see.
    """
    known = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    for name, value in {**known.globals, **known.nonlocals}.items() if known is not None else ():
        if isinstance(value, torch.Tensor | torch.nn.Module):
            raise InvalidArgumentError(
                f"{getattr(function, '__name__', 'function')}: expected a function of its arguments, got one that "
                f"reads {name}, a {type(value).__name__}; pass it as an argument, or write a module"
            )
    module = module_to_jax(_FunctionModule(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return call


def class_to_jax(cls: type) -> type:
    """Makes the objects of a class of modules run on JAX once they are made; returns the class.

    Those of its subclasses do not.

    Raises:
        InvalidArgumentError: it is no class of modules.
    """
    if not issubclass(cls, torch.nn.Module):
        raise InvalidArgumentError(f"to_jax: expected a class of torch.nn.Module, got {cls.__name__}")
    own: Callable[..., None] = cls.__init__

    @functools.wraps(own)
    def init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if type(self) is cls:
            module_to_jax(self)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls
