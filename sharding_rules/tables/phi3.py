"""Phi-3 and Phi-4: Llama's layers with fused products.

Queries, keys and values are one product, gate and up another.
"""

from sharding_rules.rules import Rule, RuleTable
from sharding_rules.tables.llama import ATTENTION, EMBEDDINGS

_LAYER = r"(model\.)?layers\.\d+\."

TABLE = RuleTable(
    family="phi3",
    rules=(
        *EMBEDDINGS,
        Rule(_LAYER + r"self_attn\.qkv_proj\.weight", ("qkv", "embed")),
        Rule(_LAYER + r"mlp\.gate_up_proj\.weight", ("gate_up", "embed")),
        Rule(_LAYER + r"mlp\.down_proj\.weight", ("embed", "mlp")),
        *(rule for rule in ATTENTION if "o_proj" in rule.pattern and "weight" in rule.pattern),
    ),
    attributes=((r"(model\.)?layers\.\d+\.self_attn", "num_key_value_heads", "num_kv_heads"),),
)
