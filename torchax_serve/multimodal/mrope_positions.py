"""Positions of tokens in a grid of image patches (M-RoPE).

Model code computes them on the host.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from model_adapters.program.call_signature import CACHE_NAMES, forward_of

COUNTER = "compute_3d_position_ids"
"""Name of transformers' method that computes the positions if the caller of ``forward`` gives none."""
_KINDS = "mm_token_type_ids"
"""Argument without which a grid has no positions: a forward that lacks it, as ColQwen2's, hands on no grid either."""


def positions_on_host(model: torch.nn.Module, given: Mapping[str, Any], cache: Any) -> torch.Tensor | None:
    """Returns the positions of a call without any, int64[axes, batch, len].

    None if the model has no grid positions. As in eager PyTorch, the model's method stores on the model what later
    tokens need.

    Args:
        model: a model that may have such a method on a submodule.
        given: tensors by the forward's argument names.
        cache: cache of the tokens before, or None.
    """
    owner = next((child for child in model.modules() if hasattr(type(child), COUNTER)), None)
    if owner is None or given.get("position_ids") is not None:
        return None
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if tokens is None:
        return None
    counter = getattr(owner, COUNTER)
    known = {**given, **dict.fromkeys(CACHE_NAMES, cache)}  # the method has one of these names
    known["inputs_embeds"] = torch.empty(*tokens.shape[:2], 0)  # only the shape is read
    parameters = inspect.signature(counter).parameters
    if _KINDS in parameters and _KINDS not in forward_of(model)[1].parameters:
        known = {name: value for name, value in known.items() if not name.endswith("_grid_thw")}
    return counter(**{p.name: known.get(p.name) for p in parameters.values() if p.kind is not p.VAR_KEYWORD})
