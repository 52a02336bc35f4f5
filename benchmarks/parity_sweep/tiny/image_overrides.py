"""Configurations, pixels and placeholders by model type, where no rule of `images` fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from parity_sweep.tiny.config import FIRST_MARKER

SIZE = 16
"""Side of an image, in pixels."""
PATCH = 4
"""Side of a patch, in pixels."""
_GRID = (1, SIZE // PATCH, SIZE // PATCH)

Inputs = dict[str, Any]
Maker = Callable[[PreTrainedConfig, torch.Generator], Inputs]

_WINDOWED = {"window_size": 16, "fullatt_block_indexes": [1]}
_INTERN = {"vision_config": {"image_size": [SIZE, SIZE], "patch_size": [PATCH, PATCH]}}
_SAM = {"global_attn_indexes": [1], "window_size": 2, "output_channels": 8, "mlp_dim": 48}
_VISUAL_TOKENS = range(100, 108)
_ANYRES = {"image_grid_pinpoints": [[SIZE, SIZE], [SIZE, 2 * SIZE]], "vision_feature_layer": -1}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
_AXES = {"text_config": {"rope_parameters": _ROPE}}
_SPEAKING = {
    "vision_start_token_id": 120,
    "vision_end_token_id": 119,
    "audio_start_token_id": 118,
    "audio_end_token_id": 117,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "image_token_id": FIRST_MARKER,
        "image_token_offset": _VISUAL_TOKENS.start,
        "audio_token_offset": _VISUAL_TOKENS.stop,
        "vision_config": {
            "codebook_size": len(_VISUAL_TOKENS),
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [8],
            "resolution": SIZE,
            "latent_channels": 4,
            "embed_dim": 4,
        },
        "audio_config": {"codebook_size": 8, "codebook_dim": 32},
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": FIRST_MARKER},
    "instructblip": {"image_token_index": FIRST_MARKER},
    "instructblipvideo": {"video_token_index": FIRST_MARKER},
    "chameleon": {
        "vocabulary_map": {"<image>": FIRST_MARKER}
        | {f"IMGIMG{chr(ord('A') + index)}Z": token for index, token in enumerate(_VISUAL_TOKENS)},
        "vq_config": {
            "num_embeddings": len(_VISUAL_TOKENS),
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "resolution": SIZE,
            "latent_channels": 32,
        },
    },
    "emu3": {
        "vocabulary_map": {"<image>": FIRST_MARKER, "<|extra_200|>": 108}
        | {f"<|visual token {index:06}|>": token for index, token in enumerate(_VISUAL_TOKENS)},
        "vq_config": {
            "codebook_size": len(_VISUAL_TOKENS),
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [8],
            "temporal_downsample_factor": 1,
            "z_channels": 4,
            "embed_dim": 4,
        },
    },
    "cosmos3_edge": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
        },
        "vision_config": {"sam_config": {**_SAM, "downsample_channels": [16, 32], "image_size": 64}},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"image_size": 64, "global_attn_indexes": [1], "window_size": 2}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
            "moe_intermediate_size": [24, 24],
        }
    },
    "gemma4": {"start": {"vision_config": {}}, "vision_config": {"position_embedding_size": 16}},
    "gemma4_unified": {"start": {"vision_config": {}}},
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "qwen2_vl", "paddleocr_vl"), _AXES),
    "hy_v4_vl": {"text_config": {"qk_rope_head_dim": 8, "head_dim": 8, "rope_parameters": _ROPE}},
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}}},
    "glm5_next": {"text_config": {"index_kpool": 2, "qk_rope_head_dim": 0, "head_dim": 0}},
    "granite4_vision": _ANYRES
    | {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "vision_config": {"hidden_size": 64},
        "qformer_config": {"num_hidden_layers": 1, "cross_attention_frequency": 1},
    },
    "kimi_k25": {"projection_hidden_size": 32},
    "minicpm_ocr": {"image_token_id": FIRST_MARKER},
    "minicpmv4_6": {"image_token_id": FIRST_MARKER},
    "minicpmv4_7": {"image_token_id": FIRST_MARKER},
    "muse_glimmer": {"out_hidden_size": 128},
    "granite_docling": {"vision_config": {"out_hidden_size": 32, "image_size": 32, "deepstack_visual_indexes": [0]}},
    "hyperclovax_vision_v2": {"vision_config": _WINDOWED},
    "exaone4_5": {"vision_config": _WINDOWED},
    "qwen2_5_vl": {"vision_config": _WINDOWED} | _AXES,
    "qwen2_5_omni_thinker": {"vision_config": _WINDOWED} | _AXES | _SPEAKING,
    "qwen3_omni_moe_thinker": _SPEAKING,
    "internvl": _INTERN,
    "qianfan_ocr": _INTERN,
    "llava_next": _ANYRES,
    "llava_next_video": _ANYRES,
    "llava_onevision": _ANYRES,
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "llama4": {"vision_config": {"projector_input_dim": 32, "intermediate_size": 128}},
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [-1, 0]},
        "vision_config": {"image_size": [SIZE, SIZE], "num_position_embeddings": 16},
        "image_patch_id": FIRST_MARKER,
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "image_token_id": FIRST_MARKER,
        "vision_hidden_size": 32,
    },
    "pp_formulanet": {
        "vision_config": _SAM
        | {
            "decoder_hidden_size": 32,
            "post_conv_in_channels": 8,
            "post_conv_mid_channels": 16,
            "post_conv_out_channels": 32,
        }
    },
    "step3p7": {"text_config": {"sliding_window": 6}},
    "mllama": {
        "vision_config": {
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            "max_num_tiles": 4,
        },
        "text_config": {"cross_attention_layers": [1]},
    },
    "unlimited_ocr": {
        "text_config": {"num_key_value_heads": 4},
        "vision_config": {"sam_config": {**_SAM, "downsample_channels": [16, 32]}},
    },
    "muse_spark": {"audio_config": {"out_hidden_size": 32}, "out_hidden_size": 128},
    "got_ocr2": {"vision_config": {"global_attn_indexes": [1], "window_size": 2, "output_channels": 8, "mlp_dim": 48}},
}
"""Values of configurations by model type; those of a sub-configuration stand under its name."""


def _image(generator: torch.Generator, *before: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(*before, 3, size, size, generator=generator)


def _is_marker(ids: torch.Tensor) -> torch.Tensor:
    return (ids == FIRST_MARKER).long()


def _questioned(config: PreTrainedConfig, generator: torch.Generator, num_frames: int = 0) -> Inputs:
    """Returns inputs in which the question about the image is passed to its encoder, too."""
    question = torch.tensor([[5, 9, 7]])
    return {
        "pixel_values": _image(generator, 1, num_frames) if num_frames else _image(generator, 1),
        "qformer_input_ids": question,
        "qformer_attention_mask": torch.ones_like(question),
        "tokens": [FIRST_MARKER] * 4 * max(num_frames, 1),
    }


def _masked(config: PreTrainedConfig, generator: torch.Generator) -> Inputs:
    return {
        "pixel_values": _image(generator, 1, 1),
        "pixel_attention_mask": torch.ones(1, 1, SIZE, SIZE, dtype=torch.long),
    }


def _sized(config: PreTrainedConfig, generator: torch.Generator) -> Inputs:
    return {"pixel_values": _image(generator, 1), "image_sizes": torch.tensor([[SIZE, SIZE]])}


def _tiles(config: PreTrainedConfig, generator: torch.Generator) -> Inputs:
    """Returns an image twice as wide as high, as a thumbnail and two tiles."""
    return {"pixel_values": _image(generator, 1, 3), "image_sizes": torch.tensor([[SIZE, 2 * SIZE]])}


def _patches(*shape: int, **others: Any) -> Maker:
    def make(config: PreTrainedConfig, generator: torch.Generator) -> Inputs:
        return {
            "pixel_values": torch.randn(*shape, generator=generator),
            "image_grid_thw": torch.tensor([_GRID]),
            **others,
        }

    return make


def _merged(config: PreTrainedConfig, generator: torch.Generator) -> Inputs:
    """Returns patches of twice the size, four by four."""
    return {"pixel_values": torch.rand(1, _NUM, 4 * _WIDTH, generator=generator), "image_position_ids": _POINTS}


_NUM = _GRID[1] * _GRID[2]
_WIDTH = 3 * PATCH * PATCH
_POINTS = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, _NUM, 2)

PIXELS: dict[str, Maker] = {
    "fuyu": lambda config, generator: {"pixel_values": torch.randn(1, _NUM, _WIDTH, generator=generator)},
    "apertus1p5": _sized,
    "emu3": _sized,
    "granite_docling": lambda config, generator: {
        "pixel_values": _image(generator, 1, 1, size=32),
        "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
    },
    "inkling2": lambda config, generator: {
        "pixel_values": torch.randn(4, 2 * PATCH, 2 * PATCH, 3, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    },
    "inkling_mm_model": lambda config, generator: {
        "pixel_values": torch.randn(4, 2, PATCH, PATCH, 3, generator=generator)
    },
    "instructblip": _questioned,
    "instructblipvideo": lambda config, generator: _questioned(config, generator, 2),
    "kosmos-2": lambda config, generator: {
        "pixel_values": _image(generator, 1),
        "image_embeds_position_mask": _is_marker,
        "tokens": [FIRST_MARKER] * 4,
    },
    "kosmos-2.5": lambda config, generator: {
        "flattened_patches": torch.cat([_POINTS + 1.0, torch.randn(1, _NUM, _WIDTH, generator=generator)], -1),
        "image_embeds_position_mask": _is_marker,
        "tokens": [FIRST_MARKER] * 4,
    },
    "mistral4": lambda config, generator: {},
    "mllama": lambda config, generator: {
        "pixel_values": _image(generator, 1, 1, 4),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]]),
        "cross_attention_mask": lambda ids: torch.tensor([1, 0, 0, 0]).expand(*ids.shape, 1, 4).clone(),
        "tokens": [FIRST_MARKER],
    },
    "udop": lambda config, generator: {
        "pixel_values": _image(generator, 1),
        "bbox": lambda ids: torch.linspace(0, 1, ids.shape[1] * 4).reshape(*ids.shape, 4),
    },
    "gemma4": lambda config, generator: {
        "pixel_values": torch.rand(1, _NUM, _WIDTH, generator=generator),
        "image_position_ids": _POINTS,
    },
    "idefics": lambda config, generator: {
        "pixel_values": _image(generator, 1, 1),
        "image_attention_mask": lambda ids: torch.ones(*ids.shape, 1, dtype=torch.long),
    },
    "idefics2": _masked,
    "idefics3": _masked,
    "smolvlm": _masked,
    "kimi_k25": _patches(_NUM, 3, PATCH, PATCH),
    "paddleocr_vl": _patches(_NUM, 3, PATCH, PATCH),
    "muse_glimmer": _patches(_NUM, 2 * _WIDTH),
    "muse_spark": _patches(_NUM, 2 * _WIDTH),
    "video_llama_3": _patches(_NUM, _WIDTH, image_merge_sizes=torch.tensor([1])),
    "lfm2_vl": lambda config, generator: {
        "pixel_values": torch.randn(1, _NUM, _WIDTH, generator=generator),
        "spatial_shapes": torch.tensor([_GRID[1:]]),
        "pixel_attention_mask": torch.ones(1, _NUM, dtype=torch.long),
    },
    "lighton_ocr": _sized,
    "mistral3": _sized,
    "mistral_large4": _sized,
    "llava_next": _tiles,
    "llava_next_video": _tiles,
    "llava_onevision": _tiles,
    "granite4_vision": _tiles,
    "deepseek_vl_hybrid": lambda config, generator: {
        "pixel_values": _image(generator, 1),
        "high_res_pixel_values": _image(generator, 1, size=64),
    },
    "minicpm_ocr": lambda config, generator: {
        "pixel_values": torch.randn(1, 3, PATCH, _NUM * PATCH, generator=generator),
        "target_sizes": torch.tensor([_GRID[1:]]),
    },
    "nemotron_h_omni": lambda config, generator: {
        "pixel_values": torch.randn(_NUM, _WIDTH, generator=generator),
        "image_grid_hw": torch.tensor([_GRID[1:]]),
    },
    "molmo2": lambda config, generator: {
        "pixel_values": torch.randn(1, _NUM, _WIDTH, generator=generator),
        "image_token_pooling": torch.arange(_NUM).reshape(4, 4),
        "image_grids": torch.tensor([[2, 2, 0, 0]]),
        "image_num_crops": torch.tensor([1]),
    },
    "pix2struct": lambda config, generator: {
        "flattened_patches": torch.cat([_POINTS + 1.0, torch.randn(1, _NUM, _WIDTH, generator=generator)], -1)
    },
}
PIXELS |= {
    "inkling2_loop": PIXELS["inkling2"],
    "minicpmv4_6": PIXELS["minicpm_ocr"],
    "minicpmv4_7": PIXELS["minicpm_ocr"],
    "gemma4_unified": _merged,
}
"""Functions that make a model's image inputs from its configuration and a generator of random numbers."""
TOKENS: dict[str, int] = {
    "chameleon": FIRST_MARKER,
    "emu3": FIRST_MARKER,
    "molmo2": FIRST_MARKER,
    "instructblipvideo": FIRST_MARKER,
}
"""Placeholders that configurations do not name."""
UNMARKED = frozenset({"paligemma"})
"""Types whose processor marks no token of a prompt: all of it is a prefix, and a suffix is what is learned."""
WRAPPED: dict[str, tuple[list[int], list[int]]] = dict.fromkeys(
    ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), ([120], [119])
)
"""Tokens before and after the placeholders, without which a model does not see them."""
