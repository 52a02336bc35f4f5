"""`to_jax`: a model, module, pipeline or function that runs on JAX from then on."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from model_adapters.errors import UnsupportedArgumentError
from model_adapters.tested_releases import log_newer_releases
from torchax_serve.generation.jax_model import model_to_jax
from torchax_serve.validation.argument_hints import refuses_unknown
from torchax_serve.validation.library_objects import is_other_module, is_pipeline


@refuses_unknown
def to_jax(model: Any, *, quantization: Any = None) -> Any:
    """Makes `model` run on JAX and returns it, with its methods compiled.

    Of a model of transformers these are ``forward`` and ``generate``. Of a pipeline of diffusers they are the methods
    of its models; its loop and scheduler stay diffusers' own. Of any other module it is ``forward``; a function of
    tensors and a class of modules, as under a decorator, are returned as one that runs on JAX. The call is idempotent.
    On the CPU the weights share memory with the torch tensors. A later change of the model (an adapter, a hook, a
    weight) takes effect at the next call, or that call raises.

    Args:
        model: A model of transformers, a ``PeftModel`` around one, a pipeline or model of diffusers, any other
            ``torch.nn.Module``, a class of such, or a function of tensors. Modules are set to evaluation.
        quantization: Preset, file or list of rules, as for `torchax_serve.serve`: weights of linear layers are stored
            quantized, next to the torch tensors of `model`; the others share memory. For models of transformers and
            other modules.

    Raises:
        InvalidArgumentError: `model` is none of these, is on another device than the CPU, offloaded, or compiled by
            ``torch.compile``; rules that do not fit it.
        UnsupportedModelError: weights in float64, or quantized.
        UnsupportedArgumentError: `quantization` with a pipeline, a class or a function.
    """
    log_newer_releases()
    if quantization is None or is_other_module(model) or not _is_other(model):
        return _to_jax(model, quantization)
    raise UnsupportedArgumentError(
        f"quantization: expected none with a {type(model).__name__}, got {quantization!r}; models of transformers and "
        "other modules are quantized"
    )


def _is_other(model: Any) -> bool:
    """Returns whether `model` is no model of transformers, and wraps none, as peft's does."""
    return is_other_module(model) or is_pipeline(model) or inspect.isfunction(model) or isinstance(model, type)


def _to_jax(model: Any, quantization: Any) -> Any:
    if not _is_other(model):
        return model_to_jax(model, quantization=quantization)
    if is_pipeline(model):
        from torchax_serve.diffusion.pipeline import pipeline_to_jax

        return pipeline_to_jax(model)
    from torchax_serve.modules.to_jax import class_to_jax, function_to_jax, module_to_jax

    if isinstance(model, type):
        return class_to_jax(model)
    if isinstance(model, torch.nn.Module):
        return module_to_jax(model, quantization=quantization)
    return function_to_jax(model)
