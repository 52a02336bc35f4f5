"""Tiny configurations by name.

Each differs from the default of its type in one thing that checkpoints vary.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from parity_sweep.tiny.config import tiny_config

_ROPE_TABLE = "parity_sweep.tiny.rope_types"
_ROPE_FAMILIES = ("llama", "qwen3", "phi3")
_WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "layer_types": None}
_KINDS_OF_LAYERS = {"layer_types": ["full_attention", "sliding_attention"]}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_STRANGE_KEYS = {
    "_some_trainers_note": {"epochs": 3},
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "use_mup_scaling": None,
    "transformers.js_config": {"dtype": "q4"},
}


@dataclasses.dataclass(frozen=True)
class ConfigurationCase:
    """Configuration to check.

    Attributes:
        model_type: Type of a causal or a sequence-to-sequence model.
        overrides: Values that differ from those of the type's tiny configuration.
        is_tied: Whether the head is always tied to the embedding.
        changed: Function that returns a changed copy of the tiny configuration.
    """

    model_type: str
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_tied: bool = False
    changed: Callable[[PreTrainedConfig], PreTrainedConfig] | None = None

    def config(self) -> PreTrainedConfig:
        """Builds the configuration."""
        config = tiny_config(self.model_type, overrides=self.overrides)
        return config if self.changed is None else self.changed(config)


_TIED = {"tie_word_embeddings": True}
_UNTIED = {"tie_word_embeddings": False}

_CASES: dict[str, ConfigurationCase] = {
    "tied head: llama": ConfigurationCase("llama", _TIED, is_tied=True),
    "tied head: qwen3": ConfigurationCase("qwen3", _TIED, is_tied=True),
    "head of its own: gemma2": ConfigurationCase("gemma2", _UNTIED),
    "head of its own: gpt2": ConfigurationCase("gpt2", _UNTIED),
    "gated products: t5": ConfigurationCase("t5", {"feed_forward_proj": "gated-gelu"}),
    "biases: llama": ConfigurationCase("llama", {"attention_bias": True, "mlp_bias": True}),
    "no biases: starcoder2": ConfigurationCase("starcoder2", {"use_bias": False}),
    "no biases: gpt_neox": ConfigurationCase("gpt_neox", {"attention_bias": False, "use_parallel_residual": False}),
    "biases of queries and keys: stablelm": ConfigurationCase(
        "stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}
    ),
    "norms of queries and keys: stablelm": ConfigurationCase("stablelm", {"qk_layernorm": True}),
    "values clipped: olmo": ConfigurationCase("olmo", {"clip_qkv": 0.5}),
    "heads wider than the model: llama": ConfigurationCase("llama", {"head_dim": 16}),
    "heads wider than the model: mistral": ConfigurationCase("mistral", {"head_dim": 16, "sliding_window": None}),
    "one head of keys: mistral": ConfigurationCase("mistral", {"num_key_value_heads": 1}),
    "a part of a head rotated: phi": ConfigurationCase("phi", {"partial_rotary_factor": 0.25}),
    "several heads of keys: gpt_bigcode": ConfigurationCase("gpt_bigcode", {"multi_query": False}),
    "alibi: falcon": ConfigurationCase("falcon", {"alibi": True, "new_decoder_architecture": False}),
    "norms after attention: opt": ConfigurationCase("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "window from a layer on: qwen2": ConfigurationCase("qwen2", _WINDOWED),
    "window from a layer on: qwen3": ConfigurationCase("qwen3", _WINDOWED),
    "a window beside max_window_layers, unused: qwen2": ConfigurationCase(
        "qwen2", _WINDOWED | {"use_sliding_window": False}
    ),
    "kinds of layers listed: gemma3": ConfigurationCase("gemma3_text", _KINDS_OF_LAYERS),
    "kinds of layers listed: qwen3": ConfigurationCase("qwen3", _WINDOWED | _KINDS_OF_LAYERS),
    "no window: phi3": ConfigurationCase("phi3", {"sliding_window": None}),
    "softcaps: gemma2": ConfigurationCase("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "no softcaps: gemma2": ConfigurationCase(
        "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "multipliers: granite": ConfigurationCase("granite", {"attention_multiplier": 0.5, "logits_scaling": 2.0}),
    "dense first layer: deepseek_v3": ConfigurationCase(
        "deepseek_v3", {"first_k_dense_replace": 1, "num_hidden_layers": 3}
    ),
    "queries without a low rank: deepseek_v2": ConfigurationCase("deepseek_v2", {"q_lora_rank": None}),
    "dense first layer: glm4_moe": ConfigurationCase("glm4_moe", {"first_k_dense_replace": 1, "use_qk_norm": True}),
    "dense layers listed: qwen2_moe": ConfigurationCase("qwen2_moe", {"mlp_only_layers": [0]}),
    "dense layers in turns: qwen3_moe": ConfigurationCase(
        "qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}
    ),
    "no experts chosen twice: mixtral": ConfigurationCase("mixtral", {"num_experts_per_tok": 1, "sliding_window": 6}),
    "text inside: gemma3": ConfigurationCase("gemma3"),
    "text inside: mistral3": ConfigurationCase("mistral3"),
    "text inside: qwen2_5_vl": ConfigurationCase("qwen2_5_vl", {"text_config": {"rope_parameters": _MROPE}}),
    "keys that nothing reads: llama": ConfigurationCase("llama", _STRANGE_KEYS),
    "a list of end tokens: llama": ConfigurationCase("llama", {"eos_token_id": [2, 7, 9]}),
    "an encoder that generates: rembert": ConfigurationCase(
        "rembert", changed=lambda config: _set(config, is_decoder=False)
    ),
}


def _set(config: PreTrainedConfig, **values: Any) -> PreTrainedConfig:
    for name, value in values.items():
        setattr(config, name, value)
    return config


def _rope_cases() -> dict[str, ConfigurationCase]:
    """Returns a case for each kind of rotary embedding.

    The first family has every kind, the others have some.
    """
    if importlib.util.find_spec(_ROPE_TABLE) is None:
        return {}
    table: Any = importlib.import_module(_ROPE_TABLE)

    def case(family: str, kind: str) -> ConfigurationCase:
        return ConfigurationCase(family, changed=lambda config: table.with_rope(config, kind))

    first, *others = _ROPE_FAMILIES
    cases = {f"rope {kind}: {first}": case(first, kind) for kind in table.KINDS}
    return cases | {
        f"rope {kind}: {family}": case(family, kind) for family in others for kind in table.LENGTH_DEPENDENT
    }


def cases() -> dict[str, ConfigurationCase]:
    """Returns all configurations by name."""
    return _CASES | _rope_cases()
