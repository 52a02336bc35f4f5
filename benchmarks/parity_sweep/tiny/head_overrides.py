"""Configurations and inputs of models with heads, where no rule of `heads` fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parity_sweep.tiny.audio import MIMI
from parity_sweep.tiny.config import FIRST_MARKER

Inputs = dict[str, Any]
Maker = Callable[[Any, torch.Generator, str], Inputs]

_RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "out_indices": [1, 2, 3, 4],
}
_ON_RESNET = {
    "start": {"backbone_config": {"model_type": "resnet"}, "use_timm_backbone": False},
    "backbone_config": _RESNET,
    "d_model": 32,
    "encoder_layers": 1,
}
_RT_DETR = {"encoder_layers": 1, "num_queries": 12, "num_denoising": 0}
_EFFICIENT = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}
_SAM_VISION = {"global_attn_indexes": [1], "window_size": 2, "mlp_dim": 48}
_SAM2_DET = {
    "hidden_size": 16,
    "embed_dim_per_stage": [16, 32, 64, 128],
    "blocks_per_stage": [1, 1, 2, 1],
    "num_attention_heads_per_stage": [1, 2, 2, 2],
    "window_size_per_stage": [4, 4, 2, 2],
    "global_attention_blocks": [3],
    "window_positional_embedding_background_size": [4, 4],
}
_SAM2 = {
    "vision_config": {
        "backbone_config": _SAM2_DET,
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "prompt_encoder_config": {"mask_input_channels": 8},
    "mask_decoder_config": {"mlp_dim": 48, "iou_head_hidden_dim": 32},
}
_DPT_NECK = {"neck_hidden_sizes": [8, 16, 16, 32], "fusion_hidden_size": 16}
_SWIN = {"window_size": 2}
_SWIN_BACKBONE = {"backbone_config": _SWIN}
_TRANSDUCER = {"decoder_hidden_size": 32, "encoder_config": {"subsampling_conv_channels": 16}}
_STREAMING = {
    "decoder_hidden_size": 32,
    "encoder_config": {"subsampling_conv_channels": 16, "default_num_lookahead_tokens": 1},
}
_SAM3 = {
    "vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "prompt_encoder_config": {"mask_input_channels": 8},
    "mask_decoder_config": {"mlp_dim": 48, "iou_head_hidden_dim": 32},
}
_INTRACLASS = {
    "intraclass_block_config": {
        "reduce_channel": [1, 1, 0],
        "return_channel": [1, 1, 0],
        **{
            f"{direction}_{ratio}ratio": [kernel(size), [1, 1], kernel(size // 2, 0)]
            for ratio, size in (("long", 7), ("mid", 5), ("short", 3))
            for direction, kernel in (
                ("vertical_long_to_small_conv", lambda a, b=1: [a, b]),
                ("horizontal_small_to_long_conv", lambda a, b=1: [b, a]),
                ("symmetric_conv_long", lambda a, b=1: [a, a]),
            )
        },
    },
    "kernel_list": [3, 2, 2],
    "scale_factor_list": [1, 2, 4, 8],
    "neck_out_channels": 32,
}
_LCNET_V4 = {
    "block_configs": [[[3, 16, 16, 1, True]], [[3, 16, 16, 2, False]], [[3, 16, 32, 2, False]], [[3, 32, 32, 2, True]]],
    "stem_channels": (3, 8, 16),
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_SMALL_PATCHES = {"image_size": 32, "patch_size": 8}
_FLOW_HEAD = {"condition_dim": 32}
_SIGLIP2 = {"vision_config": {"patch_size": 4, "num_patches": 16}}

CONFIGS: dict[str, dict[str, Any]] = {
    "align": {"vision_config": _EFFICIENT, "projection_dim": 80},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "pool_scales": (1, 2)},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "pool_scales": (1, 2)},
    "chmv2": {
        "backbone_config": {"return_class_token": True},
        "post_process_channels": [8, 16, 16, 32],
        "fusion_hidden_size": 16,
        "head_hidden_size": 16,
        "number_output_channels": 16,
    },
    "conditional_detr": _ON_RESNET,
    "dab-detr": _ON_RESNET | {"hidden_size": 32},
    "deformable_detr": _ON_RESNET | {"num_feature_levels": 4},
    "detr": _ON_RESNET | {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "table-transformer": _ON_RESNET,
    "d_fine": _RT_DETR,
    "deimv2": _RT_DETR,
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "pp_doclayout_v3": _RT_DETR,
    "pp_doclayout_v4": _RT_DETR,
    "depth_anything": _DPT_NECK
    | {"reassemble_hidden_size": 32, "patch_size": 16, "backbone_config": {"patch_size": 16}},
    "prompt_depth_anything": _DPT_NECK
    | {"reassemble_hidden_size": 32, "patch_size": 16, "backbone_config": {"patch_size": 16}},
    "dpt": _DPT_NECK | {"num_hidden_layers": 4, "backbone_out_indices": (0, 1, 2, 3)},
    "tipsv2_dpt": _DPT_NECK,
    "zoedepth": _DPT_NECK | {"bottleneck_features": 16},
    "donut-swin": _SWIN,
    "efficientnet": _EFFICIENT,
    "efficientloftr": {"hidden_size": 256, "num_attention_heads": 8, "stage_num_blocks": [1, 1, 1, 1]},
    "grounding-dino": _SWIN_BACKBONE,
    "mm-grounding-dino": _SWIN_BACKBONE,
    "lw_detr": {
        "d_model": 32,
        "projector_scale_factors": [1.0],
        "backbone_config": {"num_windows": 4, "num_hidden_layers": 4, "window_block_indices": [0, 2]},
    },
    "mask2former": _SWIN_BACKBONE | {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32},
    "oneformer": _SWIN_BACKBONE,
    "maskformer": {
        "start": {
            "backbone_config": {"model_type": "swin"},
            "decoder_config": {"model_type": "detr", "backbone_config": {"model_type": "resnet"}},
        },
        "backbone_config": _SWIN | {"out_indices": [1, 2, 3, 4]},
        "fpn_feature_size": 32,
        "mask_feature_size": 32,
        "decoder_config": {"start": {"backbone_config": {"model_type": "resnet"}}, "d_model": 32},
    },
    "nemotron3_diarization": {
        "audio_config": {"num_key_value_heads": 4},
        "head_config": {"audio_hidden_size": 32, "hidden_size": 32},
    },
    "gradium_phonon_tts": {"flow_head_config": _FLOW_HEAD},
    "pocket_tts": {"flow_head_config": _FLOW_HEAD},
    "parakeet_rnnt": _TRANSDUCER,
    "parakeet_tdt": _TRANSDUCER,
    "nemotron_asr_streaming": _STREAMING,
    "nemotron3_5_asr": _STREAMING,
    "sam": {"vision_config": _SAM_VISION},
    "sam_hq": {"vision_config": _SAM_VISION, "mask_decoder_config": {"vit_dim": 32}},
    "sam3_tracker": _SAM3,
    "sam3_video": {"tracker_config": _SAM3 | {"image_size": 56}},
    "sam2": _SAM2,
    "sam2_video": _SAM2,
    "edgetam_video": _SAM2,
    "siglip2": _SIGLIP2,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "swin2sr": {"num_heads": [2] * 6, "window_size": 4},
    "timesfm": {"context_length": 64, "horizon_length": 32, "head_dim": 8},
    "timesfm2_5": {"context_length": 64, "horizon_length": 32, "output_quantile_len": 32},
    "sapiens2": {
        "start": {"head_config": {}},
        "num_hidden_layers": 2,
        "num_key_value_heads_per_layer": [4, 2],
        "head_config": {"upsample_out_channels": [16, 16], "conv_out_channels": [16]},
    },
    "convnext": {"hidden_sizes": [8, 16, 16, 32]},
    "convnextv2": {"hidden_sizes": [8, 16, 16, 32]},
    "bros": {"hidden_size": 64},
    "csm": {"codec_config": MIMI},
    "cvt": {"depth": (1, 2, 3)},
    "depth_pro": {
        "patch_size": 32,
        "intermediate_hook_ids": (1, 0),
        "intermediate_feature_dims": (16, 16),
        "scaled_images_feature_dims": (16, 16, 8),
        "fusion_hidden_size": 16,
        "image_model_config": _SMALL_PATCHES,
        "patch_model_config": _SMALL_PATCHES,
        "fov_model_config": _SMALL_PATCHES,
    },
    "pp_ocrv5_server_det": _INTRACLASS,
    "pp_ocrv6_medium_det": _INTRACLASS | {"backbone_config": _LCNET_V4},
    "pp_ocrv6_small_det": {"backbone_config": _LCNET_V4, "layer_list_out_channels": [16, 16, 32, 32]},
    "perceiver": {"num_cross_attention_heads": 1, "num_latents": 8, "d_latents": 32, "num_blocks": 1},
    "pp_doclayout_v2": _RT_DETR | {"class_thresholds": [0.5] * 20, "class_order": list(range(20))},
    "granite_speech5_ctc": {"encoder_config": {"num_key_value_heads": 4}},
    "colqwen2": {"vlm_config": {"text_config": {"rope_parameters": _ROPE}}},
    "shieldgemma2": {
        "yes_token_index": 7,
        "no_token_index": 9,
        "mm_tokens_per_image": 4,
        "vision_config": {"patch_size": 16},
    },
    "slanext": {"post_conv_in_channels": 32, "post_conv_out_channels": 32},
    "superglue": {"hidden_size": 256},
    "vitmatte": {
        "backbone_config": {"num_channels": 4},
        "convstream_hidden_sizes": [8, 16, 16],
        "fusion_hidden_sizes": [16, 16, 8, 8],
    },
    "vitpose_backbone": {"part_features": 8},
    "vitpose": {"backbone_config": {"part_features": 8}},
    "upernet": {
        "start": {"backbone_config": {"model_type": "convnext"}},
        "backbone_config": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "out_indices": [1, 2, 3, 4]},
        "auxiliary_in_channels": 16,
        "pool_scales": (1, 2),
    },
    "vits": {
        "flow_size": 16,
        "spectrogram_bins": 17,
        "upsample_initial_channel": 16,
        "upsample_rates": [4, 4],
        "upsample_kernel_sizes": [8, 8],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
        "prior_encoder_num_flows": 2,
        "prior_encoder_num_wavenet_layers": 1,
        "posterior_encoder_num_wavenet_layers": 1,
        "depth_separable_num_layers": 1,
        "duration_predictor_num_flows": 2,
        "duration_predictor_filter_channels": 16,
        "wavenet_dilation_rate": 1,
        "noise_scale": 0.0,  # the numbers that it draws are others on JAX
        "noise_scale_duration": 0.0,
    },
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
}
"""Values of configurations by model type; those of a sub-configuration stand under its name."""
FOR_TASKS: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen3_asr", "token classification"): {"text_config": {"layer_types": ["full_attention"] * 2}},
    ("t5gemma2", "token classification"): {"encoder": {"mm_tokens_per_image": 4}},
    ("blip-2", "zero shot image classification"): {"qformer_config": {"use_qformer_text_input": True}},
}
"""Further values by model type and task."""


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _ids(generator: torch.Generator, *shape: int, end: int = 90) -> torch.Tensor:
    return torch.randint(5, end, shape, generator=generator)


def _two_images(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {"pixel_values": _random(generator, 1, 2, 3, 64, 64)}


def _samples(model: Any, generator: torch.Generator, task: str) -> Inputs:
    count = 12000 if task == "audio xvector" else 4000
    return {"input_values": _random(generator, 2, count)}


def _prompted(model: Any, generator: torch.Generator, task: str) -> Inputs:
    """Returns an image with two points for a model that makes masks."""
    size = model.config.prompt_encoder_config.image_size
    return {
        "pixel_values": _random(generator, 1, 3, size, size),
        "input_points": torch.tensor([[[[12.0, 20.0], [40.0, 33.0]]]]),
        "input_labels": torch.tensor([[[1, 0]]]),
    }


def _transduced(model: Any, generator: torch.Generator, task: str) -> Inputs:
    bins = model.config.encoder_config.num_mel_bins
    return {"input_features": _random(generator, 2, 64, bins), "decoder_input_ids": _ids(generator, 2, 3)}


def _patches_of_siglip2(model: Any, generator: torch.Generator, task: str) -> Inputs:
    given = {
        "pixel_values": _random(generator, 2, 16, 48),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
    }
    return given | ({"input_ids": _ids(generator, 2, 12)} if "zero shot" in task else {})


def _queried(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {"pixel_values": _random(generator, 1, 3, 64, 64), "task_inputs": _ids(generator, 1, 77)}


def _of_series(model: Any, generator: torch.Generator, task: str) -> Inputs:
    given: Inputs = {"past_values": _random(generator, 2, 64)}
    return given | ({"freq": torch.tensor([0, 1])} if model.config.model_type == "timesfm" else {})


def _seen(model: Any, generator: torch.Generator, task: str) -> Inputs:
    """Returns a text with features of regions of an image."""
    ids = _ids(generator, 2, 12)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "visual_feats": _random(generator, 2, 6, model.config.visual_feat_dim),
        "visual_pos": torch.rand(2, 6, 4, generator=generator),
    }


def _seen_by_visual_bert(model: Any, generator: torch.Generator, task: str) -> Inputs:
    ids, regions = _ids(generator, 2, 12), _random(generator, 2, 6, model.config.visual_embedding_dim)
    ones = torch.ones(2, 6, dtype=torch.long)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "visual_embeds": regions,
        "visual_attention_mask": ones,
        "visual_token_type_ids": ones,
    }


def _marked(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {
        "input_ids": _ids(generator, 1, 12),
        "marks": torch.tensor([[4, 9]]),
        "num_options": torch.tensor([[2, 3]]),
        "question_type_ids": torch.tensor([[0, 1]]),
    }


def _decided(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return _marked(model, generator, task) if task == "decision" else {}


def _spoken(model: Any, generator: torch.Generator, task: str) -> Inputs:
    ids = _ids(generator, 2, 12, end=60)
    return {
        "input_ids": ids,
        "decoder_input_values": _random(generator, 2, 6, model.config.num_mel_bins),
        "speaker_embeddings": _random(generator, 2, model.config.speaker_embedding_dim),
    }


def _decoded(model: Any, generator: torch.Generator, task: str) -> Inputs:
    ids = _ids(generator, 2, 12)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": _ids(generator, 2, 4)}


def _of_mels(model: Any, generator: torch.Generator, task: str) -> Inputs:
    if task != "audio classification":
        return {}
    return {"input_features": _random(generator, 2, model.config.num_mel_bins, 2 * model.config.max_source_positions)}


def _of_spectrogram(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {"input_values": _random(generator, 2, model.config.max_length, model.config.num_mel_bins)}


def _of_classes(model: Any, generator: torch.Generator, task: str) -> Inputs:
    ids = _ids(generator, 3, 5)
    return {
        "pixel_values": _random(generator, 1, 3, 64, 64),
        "classes_input_ids": ids,
        "classes_attention_mask": torch.ones_like(ids),
        "tasks_input_ids": _ids(generator, 1, 6),
        "tasks_attention_mask": torch.ones(1, 6, dtype=torch.long),
        "classes_structure": torch.tensor([3]),
    }


def _answered(model: Any, generator: torch.Generator, task: str) -> Inputs:
    if "question" not in task:
        return {}
    ids = _ids(generator, 2, 8)
    return {
        "pixel_values": _random(generator, 2, 3, 64, 64),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "decoder_input_ids": _ids(generator, 2, 4),
    }


def _line_of_text(model: Any, generator: torch.Generator, task: str) -> Inputs:
    height = 48 if model.config.model_type == "pp_ocrv5_server_rec" else 96
    return {"pixel_values": _random(generator, 1, 3, height, 96)}


def _noisy(model: Any, generator: torch.Generator, task: str) -> Inputs:
    size = model.config.image_size // model.config.patch_size
    given = {"pixel_values": _random(generator, 2, 3, model.config.image_size, model.config.image_size)}
    return given | {"noise": torch.rand(2, size * size, generator=generator)}


def _codes(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {"input_ids": _ids(generator, 2, 6, model.config.num_codebooks, end=60)}


def _delayed(model: Any, generator: torch.Generator, task: str) -> Inputs:
    """Returns a text, and the codes behind it in a row for each codebook."""
    ids = _ids(generator, 2, 12)
    rows = 2 * model.config.decoder.num_codebooks
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": _ids(generator, rows, 4)}


def _stacked_frames(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {"input_features": _random(generator, 2, 64, 4 * model.config.encoder_config.num_mel_bins)}


def _large_image(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {"pixel_values": _random(generator, 1, 3, 128, 128)}


def _with_trimap(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {"pixel_values": _random(generator, 2, 4, 64, 64)} if task == "image matting" else {}


def _of_people(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {"pixel_values": _random(generator, 2, 3, 64, 64), "dataset_index": torch.tensor([0, 2])}


def _document(model: Any, generator: torch.Generator, task: str) -> Inputs:
    """Returns a query and the page of a document, whose place in the prompt is marked."""
    config = model.config.vlm_config
    marks = torch.full((1, 16), getattr(config, "image_token_id", FIRST_MARKER))
    ids = torch.cat([marks, _ids(generator, 1, 6)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": _random(generator, 1, 3, 64, 64)}


def _query(model: Any, generator: torch.Generator, task: str) -> Inputs:
    ids = _ids(generator, 2, 12)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image_and_text(model: Any, generator: torch.Generator, task: str) -> Inputs:
    ids = _ids(generator, 2, 12)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": _random(generator, 2, 3, 64, 64),
        "return_loss": False,
    }


def _judged(model: Any, generator: torch.Generator, task: str) -> Inputs:
    marks = torch.full((1, model.config.mm_tokens_per_image), model.config.image_token_index)
    ids = torch.cat([marks, _ids(generator, 1, 6)], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == model.config.image_token_index).long(),
        "pixel_values": _random(generator, 1, 3, 64, 64),
    }


def _one_channel(model: Any, generator: torch.Generator, task: str) -> Inputs:
    return {"input_values": _random(generator, 2, 1, 4000)}


def _separated(model: Any, generator: torch.Generator, task: str) -> Inputs:
    """Returns a question and a text, between two and in front of a third separator."""
    if task not in ("question answering", "multiple choice"):
        return {}
    rows = 4 if task == "multiple choice" else 2
    ids = _ids(generator, rows, 12)
    ids[:, [4, 5, 11]] = model.config.sep_token_id
    ids = ids.reshape(2, 2, 12) if task == "multiple choice" else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _with_decoder_ids(model: Any, generator: torch.Generator, task: str) -> Inputs:
    """Returns a text, also for the decoder: the configuration has no token to begin with."""
    if task != "question answering":
        return {}
    ids = _ids(generator, 2, 12)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}


INPUTS: dict[str, Maker] = {
    "audio-spectrogram-transformer": _of_spectrogram,
    "colmodernvbert": _query,
    "colpali": _document,
    "colqwen2": _query,
    "longformer": _separated,
    "modernvbert": _query,
    "t5": _with_decoder_ids,
    "t5gemma2": _query,
    "ultravbert": _query,
    "csm": _codes,
    "depth_pro": _large_image,
    "flava": _image_and_text,
    "granite_speech5_ctc": _stacked_frames,
    "musicgen": _delayed,
    "musicgen_melody": _delayed,
    "omniasr_ctc": _one_channel,
    "shieldgemma2": _judged,
    "vitmatte": _with_trimap,
    "vitpose": _of_people,
    "vitpose_backbone": _of_people,
    **dict.fromkeys(("gemma4", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_text"), _decided),
    "blip": _answered,
    **dict.fromkeys(("data2vec-audio", "unispeech-sat", "wav2vec2", "wav2vec2-conformer", "wavlm"), _samples),
    **dict.fromkeys(("efficientloftr", "lightglue", "superglue"), _two_images),
    "jev": _marked,
    "lxmert": _seen,
    "omdet-turbo": _of_classes,
    "oneformer": _queried,
    "parakeet_rnnt": _transduced,
    "parakeet_tdt": _transduced,
    "nemotron_asr_streaming": _transduced,
    "nemotron3_5_asr": _transduced,
    "pp_ocrv5_mobile_rec": _line_of_text,
    "pp_ocrv5_server_rec": _line_of_text,
    **dict.fromkeys(("sam", "sam2", "sam2_video", "sam3_tracker", "sam_hq", "edgetam_video", "sam3_video"), _prompted),
    "seamless_m4t": _decoded,
    "seamless_m4t_v2": _decoded,
    "siglip2": _patches_of_siglip2,
    "speecht5": _spoken,
    "timesfm": _of_series,
    "timesfm2_5": _of_series,
    "visual_bert": _seen_by_visual_bert,
    "vit_mae": _noisy,
    "whisper": _of_mels,
}
"""Functions that make a model's inputs from it, a generator of random numbers and a task; {} leaves it to the rules."""
