"""Transformers of diffusion pipelines: Flux and Stable Diffusion 3.

Attention and MLPs are Megatron pairs, as in :mod:`sharding_rules.tables.llama`, for image and text tokens alike. The
products that make scales and shifts of a layer from the time embedding have one row per image: their weights, a third
of Flux, are divided by outputs, and the short result is gathered. The last product of a single block reads attention
and MLP side by side: its inputs are ordered such that each device has those of its own heads and its own part of the
MLP. Nothing is filled up with zeros: sizes that the devices do not divide are replicated.
"""

from sharding_rules.rules import Rule, RuleTable

_BLOCK = r"transformer_blocks\.\d+\."
_SINGLE = r"single_transformer_blocks\.\d+\."
_ATTENTION = r"(single_)?transformer_blocks\.\d+\.attn2?\."

ATTENTION = (
    Rule(_ATTENTION + r"(to_[qkv]|add_[qkv]_proj)\.weight", ("heads", "embed")),
    Rule(_ATTENTION + r"(to_[qkv]|add_[qkv]_proj)\.bias", ("heads",), optional=True),
    Rule(_ATTENTION + r"(to_out\.0|to_add_out)\.weight", ("embed", "heads"), optional=True),
    Rule(_ATTENTION + r"(to_out\.0|to_add_out)\.bias", ("embed",), optional=True),
    Rule(_ATTENTION + r"norm_(added_)?[qk]\.weight", (None,), optional=True),  # over the head's dimension
)
MLP = (
    Rule(_BLOCK + r"ff(_context)?\.net\.0\.proj\.weight", ("mlp", "embed"), optional=True),
    Rule(_BLOCK + r"ff(_context)?\.net\.0\.proj\.bias", ("mlp",), optional=True),
    Rule(_BLOCK + r"ff(_context)?\.net\.2\.weight", ("embed", "mlp"), optional=True),
    Rule(_BLOCK + r"ff(_context)?\.net\.2\.bias", ("embed",), optional=True),
)
MODULATION = (
    Rule(r"(single_)?transformer_blocks\.\d+\.norm1?(_context)?\.linear\.weight", ("modulation", "embed")),
    Rule(r"(single_)?transformer_blocks\.\d+\.norm1?(_context)?\.linear\.bias", ("modulation",)),
)
OUTER = (
    Rule(r"(x_embedder|context_embedder|proj_out|norm_out\.linear)\.(weight|bias)", None),
    Rule(r"time_text_embed\..+", None),
)

FLUX = RuleTable(
    family="flux",
    rules=(
        *ATTENTION,
        *MLP,
        *MODULATION,
        *OUTER,
        Rule(_SINGLE + r"proj_mlp\.weight", ("mlp", "embed"), optional=True),
        Rule(_SINGLE + r"proj_mlp\.bias", ("mlp",), optional=True),
        Rule(_SINGLE + r"proj_out\.weight", ("embed", "heads_mlp"), optional=True),
        Rule(_SINGLE + r"proj_out\.bias", ("embed",), optional=True),
    ),
    pads=frozenset(),
)
SD3 = RuleTable(
    family="stable diffusion 3",
    rules=(*ATTENTION, *MLP, *MODULATION, *OUTER, Rule(r"pos_embed\..+", None)),
    pads=frozenset(),
)
