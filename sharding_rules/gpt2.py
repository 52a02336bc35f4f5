"""GPT-2.

Its layers are ``transformers.pytorch_utils.Conv1D``, whose weights are ``[in, out]``. Queries, keys and values are one
fused product, which stays whole on every device, as does the product after it; the MLP and the vocabulary are divided.
"""

from sharding_rules.rules import Rule, RuleTable

_LAYER = r"(transformer\.)?h\.\d+\."

TABLE = RuleTable(
    family="gpt2",
    rules=(
        Rule(r"(transformer\.)?wte\.weight|lm_head\.weight", ("vocab", "embed")),
        Rule(r"(transformer\.)?wpe\.weight", (None, "embed")),
        Rule(_LAYER + r"attn\.c_attn\.weight", ("embed", "fused_qkv")),
        Rule(_LAYER + r"attn\.c_attn\.bias", ("fused_qkv",)),
        Rule(_LAYER + r"attn\.c_proj\.weight", (None, "embed")),
        Rule(_LAYER + r"mlp\.c_fc\.weight", ("embed", "mlp")),
        Rule(_LAYER + r"mlp\.c_fc\.bias", ("mlp",)),
        Rule(_LAYER + r"mlp\.c_proj\.weight", ("mlp", "embed")),
        Rule(_LAYER + r"(attn|mlp)\.c_proj\.bias", ("embed",)),
        Rule(_LAYER + r"ln_[12]\.(weight|bias)|(transformer\.)?ln_f\.(weight|bias)", ("embed",)),
        Rule(_LAYER + r"attn\.(bias|masked_bias)", None, optional=True),
    ),
    whole_if_uneven=frozenset({"vocab"}),
)
