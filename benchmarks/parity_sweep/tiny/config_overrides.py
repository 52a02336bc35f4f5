"""Values of tiny configurations by model type, where no rule of `config` fits."""

from __future__ import annotations

from typing import Any

UNSET: Any = object()
"""Marker that removes the value of a rule, so that the configuration derives it."""

_ATTENTION_MAMBA = {"mamba_d_head": "auto"}
_SHARED_4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_WIDE_CHUNKS = {"attention_chunk_size": 16, "floor_scale": 4}  # of a page; queries are scaled from position 3 on
_SOUNDS_FROM_TEXT = {
    "start": {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma3n_text": _SHARED_4
    | {"num_kv_shared_layers": 2, "intermediate_size": 48, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0]},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "head_dim": 12,
        "sliding_window_size": 6,
    },
    "llama4": _WIDE_CHUNKS,
    "llama4_text": _WIDE_CHUNKS,
    "dory": _SHARED_4 | {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "inkling2_loop_text": _SHARED_4
    | {
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    },
    "gemma4_text": _SHARED_4 | {"num_kv_shared_layers": 2, "global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "bamba": _ATTENTION_MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "hrm_text": {
        "num_layers_per_stack": UNSET,
        "H_cycles": 2,
        "L_cycles": 1,
        "L_bp_cycles": [1],
    },  # more grow differences
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 6},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "reformer": {"is_decoder": True, "hash_seed": 0, "axial_pos_shape": (8, 16), "axial_pos_embds_dim": (8, 24)},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2, "layer_types": UNSET},
    "flint": {"mlp_only_layers": [0]},
    "dots1": _TWO_KINDS | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse"]},
    "laguna": _TWO_KINDS,
    "mellum": _TWO_KINDS,
    "ministral": _TWO_KINDS,
    "qwen2_moe": _TWO_KINDS | {"use_sliding_window": True},
    "smollm3": _TWO_KINDS | {"use_sliding_window": True, "sliding_window": 6},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"downsample_hidden_size": 16, "adapter_input_size": 32, "adapter_out_dim": 32},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "local_attention_window_len": 6,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            layer: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
            for layer in ("sliding_attention", "full_attention")
        },
    },
    "minicpm3": {"dim_model_base": 32},
    "deepseek_v4": {
        "partial_rotary_factor": 0.5,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        "index_topk": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,  # each is unrolled, in every layer twice
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_hidden_layers": 3,
    },
    "musicgen": _SOUNDS_FROM_TEXT,
    "musicgen_melody": _SOUNDS_FROM_TEXT,
    "mobilebert": {"normalization_type": "layer_norm"},  # without a norm, random layers grow without end
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 4},
    "esmc": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "lilt": {"hidden_size": 48},  # a sixth of it for each side of a box
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 16},
}
"""Values by the type of a configuration, also of a sub-configuration."""
