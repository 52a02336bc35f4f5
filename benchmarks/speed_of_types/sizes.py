"""Configurations of every model type at a size where a step's time is its weights.

They are the tiny ones of parity, which have a layer of every kind and sizes that fit each other, multiplied: all
numbers of one kind by the same factor, so that they still fit. An encoder of images or sound keeps its two layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

NUM_LAYERS, MOST_LAYERS = 4, 8
FACTORS: tuple[tuple[str, float, float], ...] = (
    (r"(.*_)?vocab_size(_base|_per_layer_input)?", 128, 32),
    (r"(max|n)_positions?(_embeddings)?|max_seq(uence)?_len(gth)?|n_ctx|context_length", 16, 16),
    (r"max_target_positions|original_max_position_embeddings", 16, 16),
    (r"max_source_positions", 2, 2),
    (r"attention_hidden_size|hidden_size|d_model|n_embd|(embed(ding)?|emb)_(dim|size)|lru_width", 32, 8),
    (r"backbone_hidden_size|word_embed_proj_dim|hidden_dim|dim|width|text_hidden_size|mamba_d_ssm", 32, 8),
    (r"(in|out)put_embedding_size|(pronunciation|shape)_embed_dim|hidden_size_per_layer_input", 32, 8),
    (r"(encoder|decoder|mm|qformer|projector|visual|vision|audio|post_conv_out|out)_hidden_size", 32, 8),
    (r"(vision_)?output_dim|projection_(dim|hidden_size)|text_dim|projector_(in|out)put_dim|embed_dims?", 32, 8),
    (r"axial_pos_embds_dim|dim_model_base|intermediate_hidden_size|mlp_hidden_dim", 32, 8),
    (r"adapter_(in|out)(_dim|put_size)|codebook_dim", 32, 8),
    (r"(moe|expert|shared_experts?|moe_shared_expert)_(intermediate|ffn_hidden)_size", 32 / 3, 8 / 3),
    (r"shared_intermediate_size|router_hidden_size", 32, 8),
    (r"((encoder|decoder)_)?ffn_dim|dff|dim_ff|d_inner|ffn_hidden_size|feed_forward_size|n_inner|d_ff", 64, 16),
    (r"(dense_|dense_mlp_|encoder_)?intermediate_size(_mlp)?|mlp_dim", 64, 16),
    (r"(swa_)?num_(attention_)?heads|(resampler_)?n_heads?|attention_heads|num_query_heads", 4, 1),
    (r"(num_)?(encoder|decoder)_attention_heads", 4, 1),
    (r"(swa_)?(num_key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads)|num_global_key_value_heads", 4, 1),
    (r"(global_|swa_|v_|qk_nope_|attention_)?head_dim|dim_head|kv_channels|d_kv|d_head|attention_head_size", 8, 8),
    (r"(swa_)?(qk_rope_head_dim|qk_head_dim|qk_nope_head_dim|v_head_dim)|rotary_dim|index(er)?_head_dim", 8, 8),
    (r"mrope_section", 8, 8),
    (r"(swa_)?(kv_lora_rank|q_lora_rank|o_lora_rank)|hc_lowrank", 16, 4),
    (r"index_topk|indexer_budget", 512, 512),
    (r"sliding_window(_size)?|(attention_)?window_size|local_attention(_window_len)?|keep_window_size", 32 / 3, 32 / 3),
    (r"attention_chunk_size", 32 / 3, 32 / 3),
    (r"(mamba_)?d_state|state_size|ssm_state_size", 8, 8),
    (r"mamba_(n|num)_heads|mamba_num_heads", 8, 2),
    (r"mamba_(d_head|head_dim)", 4, 4),
    (r"(mamba_)?chunk_size|block_size", 16, 16),
    (r"(mamba_)?(dt_rank|time_step_rank)", 16, 4),
    (r"linear_(num_)?(key_|value_)?heads", 4, 1),
    (r"linear_num_(key_|value_)?heads", 4, 1),
    (r"linear_(key_|value_)?head_dim", 8, 8),
)
"""Pattern of names of fields, and the factors of their values, of a large model and of a small one.

The first full match counts.
"""
_COMPILED = tuple((re.compile(pattern), factors) for pattern, *factors in FACTORS)
_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers|(num_)?(encoder|decoder)_layers|num_layers_per_stack")
_OF_MEDIA = ("patch_size", "patch_sizes", "image_size", "num_mel_bins", "codebook_size", "sampling_rate")
"""Fields of configurations of encoders of images and sound."""
_OF_TEXT = re.compile(r".*(text|decoder|language|llm).*")
_NO_SIZES = ("id2label", "label2id", "vocabulary_map", "projector_patch_to_query_dict")
_NOT_OF_LAYERS = re.compile(r"architectures|time_step_limit|.*_multipliers|conv_.*|moe_.*|.*_sizes")
_NUM_EXPERTS = re.compile(r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts")
_NUM_USED = re.compile(r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts")
_OF_EXPERTS = re.compile(r"(moe|expert)_(intermediate|ffn_hidden)_size")
NUM_EXPERTS, MOST_USED, EXPERT_WIDTHS = 16, 4, (256, 64)
FIXED: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": (16, 16)},
    "falcon_mamba": {"state_size": (16, 16)},
    "jamba": {"mamba_d_state": (16, 16)},
    "zamba": {"mamba_d_state": (16, 16)},
    "zamba2": {"n_mamba_heads": (32, 8), "mamba_headdim": (64, 64)},
    "qwen3_moe": {"decoder_sparse_step": (1, 1)},
    "glmasr": {"audio_config": {"intermediate_size": (4096, 1024)}},
    "voxtral": {"audio_config": {"intermediate_size": (4096, 1024)}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": (256, 64)}},
    "xlstm": {"hidden_size": (1024, 512), "embedding_dim": (1024, 512)},
    "longcat_flash": {"zero_expert_num": (16, 16)},
    "switch_transformers": {"d_ff": (512, 128)},
    "nllb-moe": {"encoder_ffn_dim": (512, 128), "decoder_ffn_dim": (512, 128)},
}
"""Values by the type of a configuration, where no factor fits."""


def enlarged(tiny: PreTrainedConfig, *, is_small: bool = False) -> PreTrainedConfig:
    """The configuration of the same kind with 50 million weights and more; a small one has a few."""
    return type(tiny).from_dict(_Sizes(int(is_small)).of(tiny.to_dict()))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of large models, or of small ones.

    Attributes:
        column: of factors: 0 or 1.
    """

    column: int

    def of(self, values: Mapping[str, Any], *, of_media: bool = False) -> dict[str, Any]:
        """The fields of a configuration or of a part of one, such as an encoder of media."""
        of_media = of_media or (any(name in values for name in _OF_MEDIA) and "decoder_layers" not in values)
        found = {name: self._larger(name, value, of_media) for name, value in values.items()}
        found |= self._experts(found)
        if not of_media and not self.column:
            found |= _deeper(found)
        return self._fixed(found, FIXED.get(str(values.get("model_type")), {}))

    def _fixed(self, found: dict[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in fixed.items():
            found[name] = self._fixed(found[name], value) if isinstance(value, dict) else value[self.column]
        return found

    def _larger(self, name: str, value: Any, of_media: bool) -> Any:
        if isinstance(value, dict):
            if name in _NO_SIZES:
                return value
            if name == "per_layer_config":
                return {layer: self.of(each, of_media=of_media) for layer, each in value.items()}
            return self.of(value, of_media=of_media and not _OF_TEXT.fullmatch(name))
        if of_media and (isinstance(value, list | tuple) or "vocab" in name):
            return value
        if isinstance(value, list | tuple):
            return type(value)(self._larger(name, each, of_media) for each in value)
        if not _is_number(value) or value <= 0:
            return value
        return round(
            value * next((factors[self.column] for pattern, factors in _COMPILED if pattern.fullmatch(name)), 1)
        )

    def _experts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers of experts and of those that a token uses; their width where it is the only one named."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            if _NUM_EXPERTS.fullmatch(name) and value and value != 1:
                found[name] = NUM_EXPERTS if _is_number(value) else [NUM_EXPERTS] * len(value)
        if not found:
            return {}
        for name, value in values.items():
            if _NUM_USED.fullmatch(name) and _is_number(value):
                found[name] = min(value, MOST_USED)
        if not any(_OF_EXPERTS.fullmatch(name) for name in values):
            widths = [name for name in ("intermediate_size", "ffn_hidden_size") if name in values]
            found |= dict.fromkeys(widths, EXPERT_WIDTHS[self.column])
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _deeper(values: Mapping[str, Any]) -> dict[str, Any]:
    """Repeats the layers until there are enough; what has an entry for each layer is repeated with them."""
    counts = {name: value for name, value in values.items() if _LAYERS.fullmatch(name) and _is_number(value)}
    found: dict[str, Any] = {}
    for name, few in counts.items():
        many = -(-NUM_LAYERS // few) * few if few else few
        if not few < many <= MOST_LAYERS:
            continue
        found[name] = many
        for other, value in values.items():
            if isinstance(value, list | tuple) and len(value) == few > 1 and not _NOT_OF_LAYERS.fullmatch(other):
                found[other] = type(value)(list(value) * (many // few))
            if other == "per_layer_config" and value:
                found[other] = {int(k) + start: each for start in range(0, many, few) for k, each in value.items()}
    return found
