"""Tiny configurations of any model type, derived from the type's own default configuration.

Rules match the names of fields: sizes shrink, windows become shorter than the prompts, experts several, heads
grouped. Layers that differ in the configuration's per-layer lists are kept, one of each kind, so a hybrid
has a layer of every kind. `config_overrides` has the values that no rule finds.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model_adapters.errors import UnsupportedModelError
from parity_sweep.tiny.config_overrides import OVERRIDES, UNSET

VOCAB_SIZE = 128
NUM_LAYERS = 2
MAX_LAYERS = 6
WINDOW = 6
"""Number of tokens in a sliding window; fewer than the shortest prompt has."""
MAX_POSITIONS = 128
ROTATED_DIM = 4

PATTERNS: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_base)?", VOCAB_SIZE),
    (r"type_vocab_size", 2),
    (r"vocab_size_per_layer_input", VOCAB_SIZE),
    (r"(max|n)_positions?(_embeddings)?|max_seq(uence)?_len(gth)?|n_ctx|context_length", MAX_POSITIONS),
    (r"max_(source|target)_positions", MAX_POSITIONS),
    (r"hidden_size|d_model|n_embd|(embed(ding)?|emb)_(dim|size)|lru_width|attention_hidden_size", 32),
    (r"backbone_hidden_size|word_embed_proj_dim|hidden_dim|dim|width|text_hidden_size", 32),
    (r"(in|out)put_embedding_size|(pronunciation|shape)_embed_dim", 16),
    (r"hidden_size_per_layer_input", 8),
    (r"(moe|expert|shared_experts?|moe_shared_expert)_(intermediate|ffn_hidden)_size", 24),
    (r"shared_intermediate_size|router_hidden_size|num_centroids", 24),
    (r"((encoder|decoder)_)?ffn_dim|dff|dim_ff|d_inner|ffn_hidden_size|feed_forward_size|n_inner|d_ff", 48),
    (r"(dense_|dense_mlp_)?intermediate_size(_mlp)?|mlp_dim", 48),
    (r"num_hidden_layers|n_layers?|num_layers|num_blocks|depth", NUM_LAYERS),
    (r"(num_)?(encoder|decoder)_layers|num_layers_per_stack", NUM_LAYERS),
    (r"(swa_)?num_(attention_)?heads|n_heads?|attention_heads|num_query_heads", 4),
    (r"(num_)?(encoder|decoder)_attention_heads", 4),
    (r"(swa_)?(num_key_value_heads|num_kv_heads|n_kv_heads)", 2),
    (r"(global_|swa_|v_|qk_nope_|attention_)?head_dim|dim_head|kv_channels|d_kv|d_head|attention_head_size", 8),
    (r"qk_rope_head_dim|rotary_dim", ROTATED_DIM),
    (r"qk_head_dim", 12),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank", 16),
    (r"index_head_dim", 8),
    (r"index_n_heads", 16),
    (r"index_topk", 4),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k_experts", 2),
    (r"n_shared_experts|(moe_)?num_shared_experts", 1),
    (r"n_groups?|num_expert_groups?", 2),
    (r"topk_groups?", 1),
    (r"sliding_window(_size)?|(attention_)?window_size|local_attention|attention_chunk_size|keep_window_size", WINDOW),
    (r"(mamba_)?d_state|state_size|ssm_state_size", 8),
    (r"mamba_(n|num)_heads|mamba_num_heads", 4),
    (r"mamba_(d_head|head_dim)", 16),
    (r"(mamba_)?chunk_size|block_size", 4),
    (r"(mamba_)?(dt_rank|time_step_rank)", 4),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", 4),
    (r"linear_(key_|value_)?head_dim", 8),
    (r"layer_group_size", 2),
    (r"first_k_dense_replace|num_dense_layers|num_sparse_(encoder|decoder)_layers", 1),
    (r"(encoder|decoder)_sparse_step", 2),
    (r"original_max_position_embeddings", 64),
)
Patterns = tuple[tuple[str, int], ...]
Rule = Callable[[dict[str, Any]], dict[str, Any]]
_Compiled = tuple[tuple[re.Pattern[str], int], ...]

DECODER_OF_TWO = "bert"
"""Decoder of types that combine any encoder with any decoder."""
NUM_HEADS = 4
GROUPED = {"num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8}
"""Values set even if the default leaves them open, so that keys are shared among heads."""

DECODER_FLAGS = ("is_decoder", "causal")
"""Flags of a configuration that can be an encoder's or a decoder's."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SPECIAL_IDS = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "unk": 3, "sep": 2, "cls": 1, "mask": 4}
FIRST_MARKER = VOCAB_SIZE - 1
"""Ids of image, audio and other markers count down from here; prompt ids are below `PROMPT_IDS_END`."""
PROMPT_IDS_END = 100


def tiny_config(
    model_type: str,
    *,
    as_decoder: bool = True,
    patterns: Patterns = (),
    rule: Rule | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """Builds a configuration of `model_type` for a model of some ten thousand weights.

    Args:
        model_type: Model type of transformers.
        as_decoder: Whether a type that can be either is a causal decoder instead of an encoder.
        patterns: Further patterns, tried before `PATTERNS`.
        rule: Returns further values of a configuration from its default ones.
        overrides: Values for this type, added to `config_overrides`; those of a sub-configuration under its name.

    Raises:
        UnsupportedModelError: transformers does not know the type, or cannot build its configuration; with its reason.
    """
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"expected a model type that transformers knows, got {model_type!r}")
    config_class = CONFIG_MAPPING[model_type]
    try:
        config = config_class(**_tiny_kwargs(config_class, overrides or {}, _compiled(tuple(patterns)), rule))
    except Exception as error:
        said = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"expected a tiny configuration of {model_type}, transformers raised {type(error).__name__}: {said[:300]}"
        ) from error
    for name in DECODER_FLAGS:
        if hasattr(config, name):
            setattr(config, name, as_decoder)
    return config


def is_of_two(model_type: str) -> bool:
    """Returns whether `model_type` combines any encoder with any decoder."""
    return model_type in CONFIG_MAPPING and hasattr(CONFIG_MAPPING[model_type], "from_encoder_decoder_configs")


def config_of_two(model_type: str, encoder: PreTrainedConfig) -> PreTrainedConfig:
    """Builds a configuration of `model_type` from `encoder` and a tiny decoder.

    `is_of_two` is true of `model_type`.
    """
    decoder = tiny_config(DECODER_OF_TWO)
    decoder.add_cross_attention = True
    config_class: Any = CONFIG_MAPPING[model_type]
    return config_class.from_encoder_decoder_configs(encoder, decoder)


@functools.cache
def _compiled(patterns: Patterns) -> _Compiled:
    return tuple((re.compile(pattern), value) for pattern, value in (*patterns, *PATTERNS))


def _tiny_kwargs(
    config_class: type[PreTrainedConfig], overrides: Mapping[str, Any], patterns: _Compiled, rule: Rule | None
) -> dict[str, Any]:
    """Returns the arguments of `config_class`, `overrides` last."""
    overrides = OVERRIDES.get(config_class.model_type, {}) | dict(overrides)
    start = overrides.pop("start", {})  # where the bare default configuration cannot be built
    default = config_class(**copy.deepcopy(start))
    values = {name: default.__dict__[name] for name in _fields(config_class) if name in default.__dict__}
    small = dict(start)
    markers = iter(range(FIRST_MARKER, 0, -1))

    def is_declared(name: str) -> bool:
        """Returns whether the class declares the number.

        Otherwise the configuration derives it from others.
        """
        return _is_number(getattr(config_class, name, None)) or name in start

    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            sub_class = type(value)
            sub = dict(overrides.pop(name, {}))
            small[name] = sub_class(**_tiny_kwargs(sub_class, sub, patterns, rule))
        elif name in GROUPED and (value is None or _is_number(value)):
            small[name] = GROUPED[name]
        elif name == "eos_token_id" and isinstance(value, list):
            small[name] = SPECIAL_IDS["eos"]
        elif _is_number(value) and (is_declared(name) or name.endswith("_id")):
            small_value = _small_number(name, value, markers, patterns)
            if small_value != value:
                small[name] = small_value
    if "kv_lora_rank" in values:  # latent attention: every head has its own keys, and rotates a part of them
        small["num_key_value_heads"] = NUM_HEADS
        small["head_dim"] = ROTATED_DIM if is_declared("head_dim") else UNSET
    small |= rule(values) if rule is not None else {}
    small |= _select_layers(values, overrides, patterns)
    return {name: value for name, value in (small | overrides).items() if value is not UNSET}


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fields(config_class: type[PreTrainedConfig]) -> list[str]:
    if not dataclasses.is_dataclass(config_class):
        raise TypeError(f"{config_class.__name__} declares no fields")
    return [field.name for field in dataclasses.fields(config_class)]


def _small_number(name: str, value: int, markers: Any, patterns: _Compiled) -> int:
    if match := re.fullmatch(r"(.*)_(token_id|token_index|index)", name):
        known = SPECIAL_IDS.get(match[1])
        if known is not None:
            return known
        return value if value < VOCAB_SIZE else next(markers)
    for pattern, small in patterns:
        if pattern.fullmatch(name):
            return small if value > 0 else value
    return value


def _small_entry(name: str, value: Any, patterns: _Compiled) -> Any:
    return _small_number(name, value, iter(()), patterns) if _is_number(value) else value


def _select_layers(values: Mapping[str, Any], overrides: Mapping[str, Any], patterns: _Compiled) -> dict[str, Any]:
    """Returns `values` cut to the first layers that differ in the per-layer lists.

    The number of layers and every per-layer list are cut.
    """
    counts = [name for name in LAYER_COUNTS if isinstance(values.get(name), int)]
    if not counts:
        return {}
    num_layers = values[counts[0]]
    lists = {
        name: value
        for name, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers and name not in overrides
    }
    if not lists or num_layers < NUM_LAYERS:
        return {}
    seen: dict[str, int] = {}
    for layer in range(num_layers):
        seen.setdefault(repr([value[layer] for value in lists.values()]), layer)
    layers = sorted(seen.values())[:MAX_LAYERS]
    if len(layers) < NUM_LAYERS:
        layers = list(range(NUM_LAYERS))
    wanted = overrides.get(counts[0], len(layers))
    layers = (layers * wanted)[:wanted]
    cut = {
        name: type(value)(_small_entry(name, value[layer], patterns) for layer in layers)
        for name, value in lists.items()
    }
    return cut | dict.fromkeys(counts, wanted)
