"""Mixtures of experts built on Llama's layers: Mixtral, Qwen2-MoE, Qwen3-MoE and others.

The others are relatives of OLMoE without norms over heads. The experts of a layer are two stacked tensors. They are
divided among the devices of the ``expert`` axis as units, and within an expert like an MLP: gate and up come one after
the other, and each device has its share of both.
"""

from sharding_rules.rules import Rule, RuleTable
from sharding_rules.tables.llama import ATTENTION, EMBEDDINGS

_MLP = r"(model\.)?layers\.\d+\.(mlp|block_sparse_moe)\."

EXPERTS = (
    Rule(_MLP + r"experts\.gate_up_proj", ("experts", "gate_up", "embed"), optional=True),
    Rule(_MLP + r"experts\.down_proj", ("experts", "embed", "mlp"), optional=True),
    Rule(_MLP + r"gate\.(weight|e_score_correction_bias)", None),
    Rule(_MLP + r"shared_experts?\.(gate|up)_proj\.weight", ("mlp", "embed"), optional=True),
    Rule(_MLP + r"shared_experts?\.down_proj\.weight", ("embed", "mlp"), optional=True),
    Rule(_MLP + r"shared_expert_gate\.weight", None, optional=True),
    Rule(_MLP + r"(gate|up)_proj\.weight", ("mlp", "embed"), optional=True),  # layers without experts
    Rule(_MLP + r"down_proj\.weight", ("embed", "mlp"), optional=True),
)

TABLE = RuleTable(family="mixtral", rules=(*EMBEDDINGS, *ATTENTION, *EXPERTS))
