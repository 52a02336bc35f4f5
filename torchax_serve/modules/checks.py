"""Checks of a module before it runs on JAX."""

from __future__ import annotations

import torch

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.program.module_hooks import hooked_parts


def check_module(name: str, module: torch.nn.Module) -> None:
    """Raises an error that names what of a module cannot run on JAX as it is.

    Args:
        name: What it is called in the message.
        module: The module.

    Raises:
        InvalidArgumentError: it is on another device, offloaded, or compiled by ``torch.compile``.
        UnsupportedModelError: a quantized module, or a hook.
    """
    for child in module.modules():
        is_compiled = getattr(child, "_compiled_call_impl", None) is not None
        if is_compiled or type(child).__name__ == "OptimizedModule":
            raise InvalidArgumentError(
                f"{name}: expected a module without torch.compile, got a compiled one; leave torch.compile out, JAX "
                "compiles it"
            )
        if hasattr(child, "_hf_hook") or _diffusers_hooks(child):
            raise InvalidArgumentError(
                f"{name}: expected a module in memory, without hooks, got one that is offloaded or cached by hooks "
                f"({', '.join(_diffusers_hooks(child)) or 'accelerate'}); leave enable_*_offload and enable_cache out"
            )
    if hooked := hooked_parts(module):
        raise UnsupportedModelError(
            f"{name}.{hooked[0]}: expected no forward hook, got one, which a compiled program would run once; remove it"
        )
    if getattr(module, "is_quantized", False) or getattr(module, "hf_quantizer", None) is not None:
        raise UnsupportedModelError(f"{name}: expected weights without quantization, got quantized ones; load it dense")
    for tensor_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(
                f"{name}.{tensor_name}: expected a tensor on the CPU, got one on {tensor.device}; call "
                'pipeline.to("cpu") first, JAX has its own devices'
            )


def _diffusers_hooks(child: torch.nn.Module) -> list[str]:
    """Returns names of the hooks of diffusers that replace the forward of `child`."""
    return list(getattr(vars(child).get("_diffusers_hook"), "hooks", ()))
