"""Mamba: convolutions and state spaces, in which each channel runs by itself.

The first product makes what is convolved and what gates it, one after the other; each device has its channels of both,
and the last product sums over the channels of all devices. What the states are steered by is read from all channels and
needs one sum in between (Gu and Dao 2023).
"""

from sharding_rules.rules import Rule, RuleTable

_MIXER = r"(backbone\.)?layers\.\d+\.mixer\."

TABLE = RuleTable(
    family="mamba",
    rules=(
        Rule(r"(backbone\.)?embeddings\.weight|lm_head\.weight", ("vocab", "embed")),
        Rule(_MIXER + r"in_proj\.weight", ("two_states", "embed")),
        Rule(_MIXER + r"in_proj\.bias", ("two_states",), optional=True),
        Rule(_MIXER + r"conv1d\.weight", ("state", None, None)),
        Rule(_MIXER + r"conv1d\.bias", ("state",), optional=True),
        Rule(_MIXER + r"x_proj\.weight", (None, "state")),
        Rule(_MIXER + r"dt_proj\.weight", ("state", None)),
        Rule(_MIXER + r"dt_proj\.bias", ("state",)),
        Rule(_MIXER + r"A_log", ("state", None)),
        Rule(_MIXER + r"D", ("state",)),
        Rule(_MIXER + r"out_proj\.weight", ("embed", "state")),
        Rule(_MIXER + r"out_proj\.bias", ("embed",), optional=True),
        Rule(r"(backbone\.)?(layers\.\d+\.norm|norm_f)\.weight", ("embed",)),
    ),
)
