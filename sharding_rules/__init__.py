"""How the tensors of a model lie on a mesh of devices; see :mod:`sharding_rules.rules`.

``specs_for(table_for("qwen3"), shapes, {"model": 4})`` gives a partition spec by tensor name.
"""

from collections.abc import Mapping

from sharding_rules import gpt2, llama
from sharding_rules.rules import LOGICAL_AXES, MESH_AXES, Rule, RuleTable, ShardingRuleError, specs_for

__all__ = [
    "LOGICAL_AXES",
    "MESH_AXES",
    "TABLES",
    "Rule",
    "RuleTable",
    "ShardingRuleError",
    "specs_for",
    "table_for",
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
}


def table_for(model_type: str) -> RuleTable:
    """The rule table of a ``config.model_type``.

    Raises:
        ShardingRuleError: there is none; lists the types that have one.
    """
    if model_type not in TABLES:
        raise ShardingRuleError(
            f"expected a model type with sharding rules ({', '.join(TABLES)}), got {model_type!r}; pass a RuleTable"
        )
    return TABLES[model_type]
