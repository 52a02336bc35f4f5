"""Checks of a pipeline and its modules before they run on JAX."""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.errors import InvalidArgumentError
from torchax_serve.modules.checks import check_module


def check_pipeline(pipeline: Any) -> None:
    """Raises an error that names the first module of `pipeline` that cannot run on JAX as it is.

    Raises:
        InvalidArgumentError: a module on another device, offloaded, or compiled by ``torch.compile``.
        UnsupportedModelError: a quantized module.
    """
    if getattr(pipeline, "hf_device_map", None) is not None:
        raise InvalidArgumentError(
            "device_map: expected a pipeline whose models are on the CPU, got one that accelerate has distributed; "
            "load it without device_map, JAX has its own devices"
        )
    for name, component in pipeline.components.items():
        if isinstance(component, torch.nn.Module):
            check_module(name, component)
