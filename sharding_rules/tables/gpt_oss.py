"""GPT-OSS: experts whose gate and up are interleaved by hidden unit.

They are stacked ``[experts, in, out]``.
"""

from sharding_rules.rules import Rule, RuleTable
from sharding_rules.tables.llama import ATTENTION, EMBEDDINGS

_LAYER = r"(model\.)?layers\.\d+\."

TABLE = RuleTable(
    family="gpt_oss",
    rules=(
        *EMBEDDINGS,
        *ATTENTION,
        Rule(_LAYER + r"self_attn\.sinks", ("heads",)),
        Rule(_LAYER + r"mlp\.router\.(weight|bias)", None),
        Rule(_LAYER + r"mlp\.experts\.gate_up_proj", ("experts", "embed", "mlp_pairs")),
        Rule(_LAYER + r"mlp\.experts\.gate_up_proj_bias", ("experts", "mlp_pairs")),
        Rule(_LAYER + r"mlp\.experts\.down_proj", ("experts", "mlp", "embed")),
        Rule(_LAYER + r"mlp\.experts\.down_proj_bias", ("experts", "embed")),
    ),
)
