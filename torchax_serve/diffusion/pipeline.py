"""`pipeline_to_jax`: a pipeline of diffusers, its loop untouched, with models on JAX."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from transformers import PreTrainedModel

from torchax_serve.diffusion.checks import check_pipeline
from torchax_serve.generation.jax_model import model_to_jax
from torchax_serve.modules.to_jax import methods_of, module_to_jax
from torchax_serve.validation.library_objects import is_diffusers_module

_STAY_IN_PYTORCH = ("SafetyChecker",)
"""Endings of class names of models that decide by values in Python, one image at a time."""


def pipeline_to_jax(pipeline: Any, *, latents_on_device: bool | None = None) -> Any:
    """Makes the models of a diffusers pipeline run on JAX; returns the pipeline. Idempotent.

    Text encoders run as `to_jax` makes models of transformers run, modules of diffusers by `module_to_jax`. Others
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
            vars(module_to_jax(component))["_jax_runtime"].stays_on_device = stays
    return pipeline


def _returns_fields(model: PreTrainedModel) -> bool:
    """Returns whether the forward has ``return_dict``; some of diffusers' return a tuple."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(each.name == "return_dict" or each.kind is each.VAR_KEYWORD for each in parameters)


def is_component(value: Any) -> bool:
    """Returns whether `value` is a diffusers module with a method to compile."""
    return is_diffusers_module(value) and bool(methods_of(type(value)))
