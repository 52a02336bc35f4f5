"""`to_jax`: a model or a pipeline object that runs on JAX from then on."""

from __future__ import annotations

from typing import Any

from model_adapters.errors import UnsupportedArgumentError
from model_adapters.tested_releases import log_newer_releases
from torchax_serve.generation.jax_model import model_to_jax
from torchax_serve.validation.argument_hints import refuses_unknown
from torchax_serve.validation.library_objects import is_diffusers_module, is_pipeline


@refuses_unknown
def to_jax(model: Any, *, quantization: Any = None) -> Any:
    """Makes `model` run on JAX and returns it, with its methods compiled.

    Of a model of transformers these are ``forward`` and ``generate``. Of a pipeline of diffusers they are the methods
    of its models; its loop and scheduler stay diffusers' own. The call is idempotent. On the CPU the weights share
    memory with the torch tensors. A later change of the model (an adapter, a hook, a weight) takes effect at the next
    call, or that call raises.

    Args:
        model: A model of transformers, a ``PeftModel`` around one, or a pipeline or model of diffusers.
        quantization: Preset, file or list of rules, as for `torchax_serve.serve`: weights of linear layers are stored
            quantized, next to the torch tensors of `model`; the others share memory. For models of transformers.

    Raises:
        InvalidArgumentError: `model` is none of these, is on another device than the CPU, offloaded, or compiled by
            ``torch.compile``; rules that do not fit it.
        UnsupportedModelError: weights in float64, or quantized.
        UnsupportedArgumentError: `quantization` with a pipeline.
    """
    log_newer_releases()
    if not (is_pipeline(model) or is_diffusers_module(model)):
        return model_to_jax(model, quantization=quantization)
    if quantization is not None:
        raise UnsupportedArgumentError(
            f"quantization: expected none with a {type(model).__name__}, got {quantization!r}; diffusion models run "
            "with the weights that they have"
        )
    from torchax_serve.diffusion.pipeline import component_to_jax, pipeline_to_jax

    return pipeline_to_jax(model) if is_pipeline(model) else component_to_jax(model)
