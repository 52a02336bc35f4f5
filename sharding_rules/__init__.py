"""Placement of the tensors of a model on a mesh of devices; see :mod:`sharding_rules.rules`.

``place(table_for("qwen3"), shapes, {"model": 4}, Units(16, 8))`` says by tensor name how each lies.
"""

from collections.abc import Mapping

import pytree_registry  # noqa: F401  # after which `import torchax` works on every torch
from sharding_rules.rules import (
    LOGICAL_AXES,
    MESH_AXES,
    HeadCounts,
    Rule,
    RuleTable,
    ShardingRuleError,
    TensorPlacement,
    place,
)
from sharding_rules.tables import deepseek, diffusion, gpt2, gpt_neox, gpt_oss, llama, mamba, mixtral, opt, phi3

__all__ = [
    "DIFFUSION_TABLES",
    "LOGICAL_AXES",
    "MESH_AXES",
    "TABLES",
    "HeadCounts",
    "Rule",
    "RuleTable",
    "ShardingRuleError",
    "TensorPlacement",
    "place",
]

TABLES: Mapping[str, RuleTable] = {
    "llama": llama.TABLE,
    "mistral": llama.TABLE,
    "qwen2": llama.TABLE,
    "qwen3": llama.TABLE,
    "gemma": llama.TABLE,
    "gemma2": llama.TABLE,
    "gemma3_text": llama.TABLE,
    "gpt2": gpt2.TABLE,
    "mixtral": mixtral.TABLE,
    "qwen3_moe": mixtral.TABLE,
    "qwen2_moe": mixtral.TABLE,
    "gpt_oss": gpt_oss.TABLE,
    "deepseek_v3": deepseek.TABLE,
    "phi3": phi3.TABLE,
    "gpt_neox": gpt_neox.TABLE,
    "opt": opt.TABLE,
    "mamba": mamba.TABLE,
}
"""By ``config.model_type``."""

DIFFUSION_TABLES: Mapping[str, RuleTable] = {
    "FluxTransformer2DModel": diffusion.FLUX,
    "SD3Transformer2DModel": diffusion.SD3,
}
"""By the class of the transformer in diffusers."""
