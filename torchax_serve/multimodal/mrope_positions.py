"""Positions of tokens in a grid of image patches, which model code counts on the host."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from model_adapters.program.call_signature import CACHE_NAMES

COUNTER = "compute_3d_position_ids"
"""transformers' name of the method that counts them where a caller of ``forward`` has not."""


def positions_on_host(model: torch.nn.Module, given: Mapping[str, Any], cache: Any) -> torch.Tensor | None:
    """Positions int64[axes, batch, len] for a call of `model` without any; None where it has no grids to count.

    The model's own method counts and keeps on the model what it needs for the tokens to come, as in eager PyTorch.

    Args:
        model: whose part may have the method.
        given: tensors by the forward's argument names.
        cache: what holds the tokens before, if there are any.
    """
    owner = next((child for child in model.modules() if hasattr(type(child), COUNTER)), None)
    if owner is None or given.get("position_ids") is not None:
        return None
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if tokens is None:
        return None
    counter = getattr(owner, COUNTER)
    known = {**given, **dict.fromkeys(CACHE_NAMES, cache)}  # of which the counter has one
    known["inputs_embeds"] = torch.empty(*tokens.shape[:2], 0)  # its shape is read
    parameters = inspect.signature(counter).parameters.values()
    return counter(**{p.name: known.get(p.name) for p in parameters if p.kind is not p.VAR_KEYWORD})
