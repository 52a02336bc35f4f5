"""Root-mean-square norms in models, recognised by their code.

Every architecture has a class of its own for them, and most of these classes have the same code. Where it is, to the
last instruction, that of Llama's or Gemma's, our op computes the norm while a model is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from model_adapters.bridge.views import is_view, jax_view, torch_view
from model_adapters.ops import registry
from model_adapters.ops.rms_norm import OP, rms_norm
from model_adapters.program.trace_context import replaced_methods, same_code


def intercepted(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Makes norms of `module` and its parts call this project's op inside the context."""
    children = list(module.modules())
    replacements = {kind: _replacement(kind) for kind in {type(child) for child in children}}
    return replaced_methods(
        (child, "forward", replacement)
        for child in children
        if (replacement := replacements[type(child)]) is not None and "forward" not in vars(child)
    )


def _replacement(kind: type[torch.nn.Module]) -> Callable[..., Any] | None:
    if same_code(kind, LlamaRMSNorm, "forward"):
        return _as_llama
    if same_code(kind, GemmaRMSNorm, "forward") and same_code(kind, GemmaRMSNorm, "_norm"):
        return _as_gemma
    return None


def _as_llama(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if self.weight.dtype != hidden_states.dtype:  # the product has the wider of the two
        return _own(self, hidden_states)
    return _normed(self, hidden_states, self.weight, self.variance_epsilon, rounds_first=True)


def _as_gemma(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _normed(self, x, 1.0 + self.weight.float(), self.eps, rounds_first=False)


def _normed(norm: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, *, rounds_first: bool) -> torch.Tensor:
    """Returns the op's result if it has a kernel for the arguments, else the model's own."""
    if is_view(x) and is_view(weight):
        arrays = jax_view(x), jax_view(weight)
        if registry.implementation_for(OP, *arrays, eps=eps, rounds_first=rounds_first).name != registry.REFERENCE:
            out: torch.Tensor = torch_view(rms_norm(*arrays, eps, rounds_first=rounds_first))
            return out
    return _own(norm, x)


def _own(norm: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = type(norm).forward(norm, x)
    return out
