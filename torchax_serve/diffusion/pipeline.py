"""`pipeline_to_jax`: a pipeline of diffusers, its loop untouched, with models on JAX.

The class of each model is replaced by a subclass of itself whose methods are compiled, as `to_jax` does for models of
transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import torch
from transformers import PreTrainedModel

from model_adapters.bridge.host_arrays import check_floats
from model_adapters.bridge.views import in_torch_mode
from model_adapters.errors import UnsupportedModelError
from model_adapters.once import once
from model_adapters.program.call_signature import TORCH_CLASS
from torchax_serve.diffusion.checks import check_module, check_pipeline
from torchax_serve.diffusion.component_runtime import METHODS, ComponentRuntime
from torchax_serve.generation.jax_model import model_to_jax

_STAY_IN_PYTORCH = ("SafetyChecker",)
"""Endings of class names of models that decide by values in Python, one image at a time."""


def pipeline_to_jax(pipeline: Any, *, latents_on_device: bool | None = None) -> Any:
    """Makes the models of a diffusers pipeline run on JAX; returns the pipeline. Idempotent.

    Text encoders run as `to_jax` makes models of transformers run, modules of diffusers by `component_to_jax`. Others
    (safety checkers) stay in PyTorch.

    Args:
        pipeline: The pipeline.
        latents_on_device: Whether what a module returns stays on the device, where scheduler and loop compute with it
            operator by operator; None: unless the device is the CPU, whose memory is the host's.

    Raises:
        InvalidArgumentError: a model on another device than the CPU, offloaded, or compiled by ``torch.compile``.
        UnsupportedModelError: a quantized model, or weights in float64.
    """
    check_pipeline(pipeline)
    stays = jax.default_backend() != "cpu" if latents_on_device is None else latents_on_device
    for component in pipeline.components.values():
        if isinstance(component, PreTrainedModel) and _returns_fields(component):
            if not type(component).__name__.endswith(_STAY_IN_PYTORCH):
                model_to_jax(component)
        elif is_component(component) or isinstance(component, PreTrainedModel):
            vars(component_to_jax(component))["_jax_runtime"].stays_on_device = stays
    return pipeline


def _returns_fields(model: PreTrainedModel) -> bool:
    """Returns whether the forward has ``return_dict``; some of diffusers' return a tuple."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(each.name == "return_dict" or each.kind is each.VAR_KEYWORD for each in parameters)


def is_component(value: Any) -> bool:
    """Returns whether `value` is a diffusers module with a method to compile."""
    from diffusers import ModelMixin

    return isinstance(value, ModelMixin) and bool(_methods_of(type(value)))


def component_to_jax(module: torch.nn.Module, runtime: ComponentRuntime | None = None) -> torch.nn.Module:
    """Makes ``forward``, ``encode`` and ``decode`` of a diffusers module run on JAX.

    Args:
        module: The module, such as a UNet, a transformer or an autoencoder.
        runtime: Runs its methods; None makes one of the module's own weights.
    """
    if isinstance(module, JaxComponentMixin):
        return module
    check_module(type(module).__name__, module)
    check_floats(module)
    module.eval()
    made = runtime or ComponentRuntime(module)
    cls: Any = type(module)
    module.__class__ = _jax_class(cls)
    vars(module)["_jax_runtime"] = made
    made.watch.take()
    return module


class JaxComponentMixin:
    """Mixin in front of a class of diffusers; see `component_to_jax`."""

    _jax_runtime: ComponentRuntime

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedModelError(
            f"a {type(self).__name__} on JAX cannot be copied or pickled; copy it before to_jax, or save_pretrained it"
        )


def _methods_of(cls: type) -> list[str]:
    """Returns the names of `METHODS` that `cls` itself defines, torch's placeholder aside."""
    return [name for name in METHODS if getattr(cls, name, None) not in (None, torch.nn.Module.forward)]


@once
def _jax_class(cls: type) -> type:
    """Returns the subclass of `cls` with its name whose methods run on JAX."""
    namespace: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__, TORCH_CLASS: cls}
    namespace |= {name: _compiled(name, getattr(cls, name)) for name in _methods_of(cls)}
    return type(cls.__name__, (JaxComponentMixin, cls), namespace)


def _compiled(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if in_torch_mode():  # called by another method of the module, in a trace
            return own(self, *args, **kwargs)
        return self._jax_runtime.call(name, args, kwargs)

    return method
