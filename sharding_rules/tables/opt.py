"""OPT: decoders with biases and a table of positions."""

from sharding_rules.rules import Rule, RuleTable

_LAYER = r"(model\.)?decoder\.layers\.\d+\."

TABLE = RuleTable(
    family="opt",
    rules=(
        Rule(r"(model\.)?decoder\.embed_tokens\.weight|lm_head\.weight", ("vocab", "embed")),
        Rule(r"(model\.)?decoder\.embed_positions\.weight", (None, "embed")),
        Rule(r"(model\.)?decoder\.project_(in|out)\.weight", None, optional=True),
        Rule(_LAYER + r"self_attn\.[qkv]_proj\.weight", ("heads", "embed")),
        Rule(_LAYER + r"self_attn\.[qkv]_proj\.bias", ("heads",), optional=True),
        Rule(_LAYER + r"self_attn\.out_proj\.weight", ("embed", "heads")),
        Rule(_LAYER + r"fc1\.weight", ("mlp", "embed")),
        Rule(_LAYER + r"fc1\.bias", ("mlp",), optional=True),
        Rule(_LAYER + r"fc2\.weight", ("embed", "mlp")),
        Rule(_LAYER + r"(self_attn\.out_proj|fc2)\.bias", ("embed",), optional=True),
        Rule(r"(model\.)?decoder\.(layers\.\d+\.)?\w+_layer_norm\.(weight|bias)", ("embed",), optional=True),
    ),
    attributes=((r"(model\.)?decoder\.layers\.\d+\.self_attn", "num_heads", "num_heads"),),
)
