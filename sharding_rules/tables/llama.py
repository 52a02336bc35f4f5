"""Llama and those built like it: Mistral, Qwen2, Qwen3, Gemma 1 to 3.

Queries, keys, values and the MLP's first products are divided by their outputs, the products after them by their
inputs, so that each layer needs one sum over the devices after attention and one after the MLP (Megatron-LM, Shoeybi et
al. 2019). Weights are ``[out, in]``, as in ``torch.nn.Linear``.
"""

from sharding_rules.rules import Rule, RuleTable

_LAYER = r"(model\.)?layers\.\d+\."

ATTENTION = (
    Rule(_LAYER + r"self_attn\.q_proj\.weight", ("heads", "embed")),
    Rule(_LAYER + r"self_attn\.[kv]_proj\.weight", ("kv_heads", "embed")),
    Rule(_LAYER + r"self_attn\.o_proj\.weight", ("embed", "heads")),
    Rule(_LAYER + r"self_attn\.q_proj\.bias", ("heads",), optional=True),
    Rule(_LAYER + r"self_attn\.[kv]_proj\.bias", ("kv_heads",), optional=True),
    Rule(_LAYER + r"self_attn\.o_proj\.bias", ("embed",), optional=True),
    Rule(_LAYER + r"self_attn\.[qk]_norm\.weight", (None,), optional=True),  # over head_dim, the same in all heads
)
EMBEDDINGS = (
    Rule(r"(model\.)?embed_tokens\.weight|lm_head\.weight", ("vocab", "embed")),
    Rule(_LAYER + r"\w+_layernorm\.weight|(model\.)?norm\.weight", ("embed",)),
    Rule(r"(model\.)?rotary_emb\.\w+", None, optional=True),
    Rule(r"(model\.)?embed_tokens\.embed_scale", None, optional=True),
)
MLP = (
    Rule(_LAYER + r"mlp\.(gate|up)_proj\.weight", ("mlp", "embed")),
    Rule(_LAYER + r"mlp\.down_proj\.weight", ("embed", "mlp")),
    Rule(_LAYER + r"mlp\.(gate|up)_proj\.bias", ("mlp",), optional=True),
    Rule(_LAYER + r"mlp\.down_proj\.bias", ("embed",), optional=True),
)

TABLE = RuleTable(family="llama", rules=(*EMBEDDINGS, *ATTENTION, *MLP))
