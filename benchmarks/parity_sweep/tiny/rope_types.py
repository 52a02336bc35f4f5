"""Types of rotary embeddings for a tiny configuration: every entry of transformers' table."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig

BORDER = 24
"""Number of tokens after which LongRoPE and dynamic scaling change frequencies; YaRN's and Llama 3's first length."""
MAX_POSITIONS = 96
KINDS = ("linear", "dynamic", "yarn", "yarn_unchanged", "longrope", "llama3", "proportional")
LENGTH_DEPENDENT = ("dynamic", "longrope")
LEGACY = ("linear", "dynamic", "yarn_unchanged", "longrope")
"""Kinds that older checkpoints store under ``rope_scaling``, with ``type`` for the name."""


def rope_parameters(kind: str, rotary_dim: int) -> dict[str, Any]:
    """Returns ``rope_parameters`` of `kind` for a rotation of `rotary_dim` channels."""
    half = rotary_dim // 2
    first = {"original_max_position_embeddings": BORDER}
    by_kind: dict[str, dict[str, Any]] = {
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0, **first},
        "yarn_unchanged": {"factor": 4.0, **first},
        "longrope": {"short_factor": [1.0] * half, "long_factor": [3.0 + i for i in range(half)], **first},
        "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **first},
        "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    }
    return {"rope_type": kind.partition("_")[0], "rope_theta": 100.0, **by_kind[kind]}


def max_positions(kind: str) -> int:
    """Returns ``max_position_embeddings`` for `kind`.

    It is the length trained first, or the one it was extended to.
    """
    return BORDER if kind in ("linear", "dynamic", "yarn_unchanged") else MAX_POSITIONS


def with_rope(config: PreTrainedConfig, kind: str, *, legacy: bool = False) -> PreTrainedConfig:
    """Returns a copy of a text model's `config` with rotary embeddings of `kind` in every layer.

    Args:
        config: Configuration of a model with rotary embeddings.
        kind: Kind of rotary embedding, one of `KINDS`.
        legacy: Whether to use the keys of older checkpoints, as the configuration's class reads them.
    """
    config = copy.deepcopy(config)
    before: dict[str, Any] = config.rope_parameters
    nested = [name for name, value in before.items() if isinstance(value, dict)]
    partial = (before[nested[0]] if nested else before).get("partial_rotary_factor", 1.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = rope_parameters(kind, int(head_dim * partial))
    others = {
        name: value for name, value in before.items() if name.startswith(("mrope", "partial", "llama_4", "alpha"))
    }
    rope = {**others, **rope, "partial_rotary_factor": rope.get("partial_rotary_factor", partial)}
    mscales = {"short_mscale": 1.0, "long_mscale": 1.5} if config.model_type == "phimoe" else {}
    changes: dict[str, Any] = {"max_position_embeddings": max_positions(kind)}
    if hasattr(config, "original_max_position_embeddings"):
        changes["original_max_position_embeddings"] = BORDER
    if legacy:
        values = {name: value for name, value in config.to_dict().items() if name != "rope_parameters"}
        rope["type"] = rope.pop("rope_type")
        theta = rope.pop("rope_theta")
        return type(config)(**{**values, **changes, "rope_scaling": rope | mscales, "rope_theta": theta})
    rope |= mscales
    config.rope_parameters = {name: dict(rope) for name in nested} if nested else rope
    for name, value in changes.items():
        setattr(config, name, value)
    return config
