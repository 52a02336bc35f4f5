"""Tiny random models of several architectures, and their folders."""

import json

import torch
import transformers as tf

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_OPT = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LOCAL = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**COMMON, head_dim=8),
    "llama_tied": lambda: tf.LlamaConfig(**COMMON, head_dim=8, tie_word_embeddings=True),
    "gemma3": lambda: tf.Gemma3TextConfig(**COMMON, head_dim=8, **_LOCAL),
    "gpt2": lambda: tf.GPT2Config(**_GPT2, **_SPECIAL),
    "opt": lambda: tf.OPTConfig(**_OPT, max_position_embeddings=64, word_embed_proj_dim=32, **_SPECIAL),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=4),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**COMMON, **_MOE, decoder_sparse_step=1),
    "gpt_oss": lambda: tf.GptOssConfig(**COMMON, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**COMMON, **_LATENT),
    "mamba": lambda: tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, **_SPECIAL),
    "t5": lambda: tf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    "bert": lambda: tf.BertConfig(**_BERT),
}
_CLASSES = {"t5": tf.T5ForConditionalGeneration, "bert": tf.BertForMaskedLM}


def tiny_model(name, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    if name in _CLASSES:
        return _CLASSES[name](config).to(dtype).eval()
    return tf.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def tiny_folder(folder, name="llama", dtype=torch.float32, **options):
    tiny_model(name, dtype).save_pretrained(folder, **options)
    return folder


def edit_json(file, **changes):
    """Sets keys of a JSON file; a key set to None goes."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
