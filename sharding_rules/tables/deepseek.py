"""DeepSeek V3: latent attention, and routed and shared experts.

Weights that compute the latents are replicated, since all heads read them; weights that compute heads of them are
divided by heads (DeepSeek-AI 2024, multi-head latent attention).
"""

import dataclasses

from sharding_rules.rules import Rule, RuleTable
from sharding_rules.tables.llama import EMBEDDINGS
from sharding_rules.tables.mixtral import EXPERTS

_ATTENTION = r"(model\.)?layers\.\d+\.self_attn\."

TABLE = RuleTable(
    family="deepseek",
    rules=(
        *EMBEDDINGS,
        Rule(_ATTENTION + r"(q_a_proj|kv_a_proj_with_mqa)\.(weight|bias)", None),
        Rule(_ATTENTION + r"(q_a|kv_a)_layernorm\.weight", None),
        Rule(_ATTENTION + r"(q_proj|q_b_proj|kv_b_proj)\.weight", ("heads", "latent")),
        Rule(_ATTENTION + r"o_proj\.weight", ("embed", "heads")),
        Rule(_ATTENTION + r"o_proj\.bias", ("embed",), optional=True),
        *(dataclasses.replace(rule, optional=True) for rule in EXPERTS),  # the first layers have none
    ),
    # The code counts heads itself where it opens the latents up.
    pads=frozenset({"vocab", "mlp"}),
)
