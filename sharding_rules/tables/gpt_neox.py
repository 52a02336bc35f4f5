"""GPT-NeoX and Pythia: one product for the queries, keys and values.

Its output holds query, key and value of each head next to each other.
"""

from sharding_rules.rules import Rule, RuleTable

_LAYER = r"(gpt_neox\.)?layers\.\d+\."

TABLE = RuleTable(
    family="gpt_neox",
    rules=(
        Rule(r"(gpt_neox\.)?embed_in\.weight|(embed_out|lm_head)\.weight", ("vocab", "embed")),
        Rule(_LAYER + r"attention\.query_key_value\.weight", ("heads", "embed")),
        Rule(_LAYER + r"attention\.query_key_value\.bias", ("heads",), optional=True),
        Rule(_LAYER + r"attention\.dense\.weight", ("embed", "heads")),
        Rule(_LAYER + r"mlp\.dense_h_to_4h\.weight", ("mlp", "embed")),
        Rule(_LAYER + r"mlp\.dense_h_to_4h\.bias", ("mlp",)),
        Rule(_LAYER + r"mlp\.dense_4h_to_h\.weight", ("embed", "mlp")),
        Rule(_LAYER + r"(attention\.dense|mlp\.dense_4h_to_h)\.bias", ("embed",), optional=True),
        Rule(r"(gpt_neox\.)?(layers\.\d+\.\w+_layernorm|final_layer_norm)\.(weight|bias)", ("embed",)),
        Rule(r"(gpt_neox\.)?rotary_emb\.\w+", None, optional=True),
    ),
)
