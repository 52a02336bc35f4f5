"""GPT-2.

Its layers are ``transformers.pytorch_utils.Conv1D``, whose weights are ``[in, out]``. Queries, keys and values are one
fused product, of which each device has its heads' share of all three.
"""

from sharding_rules.rules import Rule, RuleTable

_LAYER = r"(transformer\.)?h\.\d+\."

TABLE = RuleTable(
    family="gpt2",
    rules=(
        Rule(r"(transformer\.)?wte\.weight|lm_head\.weight", ("vocab", "embed")),
        Rule(r"(transformer\.)?wpe\.weight", (None, "embed")),
        Rule(_LAYER + r"attn\.c_attn\.weight", ("embed", "qkv")),
        Rule(_LAYER + r"attn\.c_attn\.bias", ("qkv",)),
        Rule(_LAYER + r"attn\.c_proj\.weight", ("heads", "embed")),
        Rule(_LAYER + r"mlp\.c_fc\.weight", ("embed", "mlp")),
        Rule(_LAYER + r"mlp\.c_fc\.bias", ("mlp",)),
        Rule(_LAYER + r"mlp\.c_proj\.weight", ("mlp", "embed")),
        Rule(_LAYER + r"(attn|mlp)\.c_proj\.bias", ("embed",)),
        Rule(_LAYER + r"ln_[12]\.(weight|bias)|(transformer\.)?ln_f\.(weight|bias)", ("embed",)),
        Rule(_LAYER + r"attn\.(bias|masked_bias)", None, optional=True),
    ),
    attributes=(
        (r"(transformer\.)?h\.\d+\.attn", "split_size", "heads"),
        (r"(transformer\.)?h\.\d+\.attn\.c_attn", "nf", "qkv"),
        (r"(transformer\.)?h\.\d+\.mlp\.c_fc", "nf", "mlp"),
    ),
)
