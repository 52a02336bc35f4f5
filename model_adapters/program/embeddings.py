"""The names of a module's parts, and its embedding tables of tokens and positions."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def token_embedding(module: torch.nn.Module) -> torch.nn.Module | None:
    """Returns the token embedding of `module`; None if it has none, or does not name it."""
    try:
        return module.get_input_embeddings() if isinstance(module, PreTrainedModel) else None
    except NotImplementedError:  # such as an audio encoder
        return None


def vocab_rows(module: torch.nn.Module) -> int | None:
    """Returns the number of rows of the token embedding of `module`; None if it has none.

    Where each codebook has a table, the smallest number counts.
    """
    embeddings = token_embedding(module)
    tables = embeddings if isinstance(embeddings, torch.nn.ModuleList) else [embeddings]
    return min((table.num_embeddings for table in tables if isinstance(table, torch.nn.Embedding)), default=None)


def submodule_name(module: torch.nn.Module, part: Any) -> str | None:
    """Returns the name of `part` among the parts of `module`."""
    return next((name for name, child in module.named_modules() if child is part and name), None)


POSITIONS = frozenset({"embed_positions", "pos_encoding"})
"""Tensors of values per position in GPT-J, CodeGen and CTRL; none of them grows."""


def learned_positions(module: torch.nn.Module, max_positions: int | None) -> int | None:
    """Returns `max_positions` if the model looks positions up in a table; None otherwise.

    Past the end of such a table there is nothing to read.
    """
    if max_positions is None:
        return None
    tables = [child for child in module.modules() if isinstance(child, torch.nn.Embedding)]
    words = token_embedding(module)
    # Some tables have a few rows more, for an offset that the model adds.
    is_table = any(max_positions <= t.num_embeddings <= max_positions + 8 for t in tables if t is not words)
    return max_positions if is_table or _has_computed_table(module, max_positions) else None


def _has_computed_table(module: torch.nn.Module, num_rows: int) -> bool:
    tensors = (
        tensor
        for child in module.modules()
        for named in (child._buffers, vars(child))
        for name, tensor in named.items()
        if name in POSITIONS and isinstance(tensor, torch.Tensor)
    )
    return any(tensor.ndim == 2 and tensor.shape[0] == num_rows for tensor in tensors)
