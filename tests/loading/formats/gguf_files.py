"""Tiny models as GGUF files, written by the package `gguf` as llama.cpp's converter does."""

import gguf
import numpy as np
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Type
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

# Types that the package can quantize to; blocks of the others are drawn.
BY_TOOL = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
DRAWN = ("Q4_K", "Q5_K", "Q6_K")
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Places of the float16 scales in a block."""

SIZES = {
    "vocab_size": 280,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_GPT2 = {"vocab_size": 280, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_MOE = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_NO_SCALING = {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "pad_token_id": 0}
CONFIGS = {
    "llama": (tf.LlamaConfig, {**SIZES, "head_dim": 64, "rope_theta": 50000.0}),
    "qwen2": (tf.Qwen2Config, SIZES),
    "qwen3": (tf.Qwen3Config, {**SIZES, "head_dim": 192}),
    "gemma2": (tf.Gemma2Config, {**SIZES, "head_dim": 64, "sliding_window": 16, "query_pre_attn_scalar": 64}),
    "gemma3": (tf.Gemma3TextConfig, {**SIZES, "head_dim": 64, "sliding_window": 16, "query_pre_attn_scalar": 64}),
    "phi3": (tf.Phi3Config, {**SIZES, "pad_token_id": 0}),
    "qwen3moe": (tf.Qwen3MoeConfig, {**SIZES, **_MOE, "head_dim": 64}),
    "gpt2": (tf.GPT2Config, _GPT2),
    "starcoder2": (tf.Starcoder2Config, {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gemma": (tf.GemmaConfig, {**SIZES, "head_dim": 64}),
    "granitemoe": (
        tf.GraniteMoeConfig,
        {
            **SIZES,
            **_EXPERTS,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.03125,
            "residual_multiplier": 0.25,
        },
    ),
    "gpt-oss": (tf.GptOssConfig, {**SIZES, **_EXPERTS, "head_dim": 64, "sliding_window": 16, **_NO_SCALING}),
}
_SAME_NAME = {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "gemma": "gemma2", "granitemoe": "llama"}
_FURTHER_KEYS = {
    "starcoder2": {"rope.freq_base": "rope_theta"},
    "qwen3": {"attention.key_length": "head_dim"},
    "granitemoe": {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "embedding_scale": "embedding_multiplier",
        "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "gpt-oss": {"attention.key_length": "head_dim", "attention.sliding_window": "sliding_window"},
}


def made(architecture, changes):
    config_class, settings = CONFIGS[architecture]
    return config_class(**{**settings, **changes})


def tiny_model(architecture, **changes):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(made(architecture, changes)).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def write_gguf(file, model, architecture, kind, *, tokenizer=True, tensors=None, **metadata):
    """Writes `model` with its matrices in the type `kind`; what the converter of llama.cpp changes is changed.

    `tensors` are further ones by their names in the file; `tokenizer` may be a function that writes one.
    """
    writer = gguf.GGUFWriter(file, architecture)
    _write_metadata(writer, model.config, architecture, metadata)
    if tokenizer:
        (tokenizer if callable(tokenizer) else write_tokenizer)(writer, model.config.vocab_size)
    table = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), model.config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for target, numbers in _converted(name, tensor.numpy(), model.config, architecture):
            stem, _, suffix = target.rpartition(".")
            is_plain = suffix in ("weight", "bias")
            found = stem if target.startswith("blk.") else table.get_name(stem if is_plain else target)
            assert found is not None, target
            found = f"{found}.{suffix}" if is_plain else f"{found}.weight"
            if numbers.ndim > 1 and numbers.shape[-1] % 256 == 0 and not found.endswith("bias"):
                writer.add_tensor(found, quantized(numbers, kind), raw_dtype=Type[kind])
            else:
                writer.add_tensor(found, np.ascontiguousarray(numbers, np.float32))
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def quantized(numbers, kind):
    if kind in BY_TOOL:
        return gguf.quantize(np.ascontiguousarray(numbers, np.float32), Type[kind])
    block, num_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    rng = np.random.default_rng(numbers.size)
    blocks = rng.integers(0, 256, (numbers.size // block, num_bytes)).astype(np.uint8)
    for place in _SCALES[kind]:
        scales = rng.uniform(0.0001, 0.001, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(*numbers.shape[:-1], -1)


def _write_metadata(writer, config, architecture, metadata):
    keys = GGUF_CONFIG_MAPPING[_SAME_NAME.get(architecture, architecture)] | _FURTHER_KEYS.get(architecture, {})
    for key, attribute in keys.items():
        value = getattr(config, attribute, None) if attribute else None
        if attribute == "rope_theta":
            rope = config.rope_parameters
            value = rope.get("full_attention", rope)["rope_theta"]
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
    if "moe_intermediate_size" in config.to_dict():
        writer.add_uint32(f"{architecture}.expert_feed_forward_length", config.moe_intermediate_size)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)


def write_tokenizer(writer, vocab_size):
    """A byte-level vocabulary with two merges and two control tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<s>", "</s>", *bytes_to_unicode().values(), "he", "hel"]
    kinds = [3, 3] + [1] * (len(tokens) - 2)
    for i in range(vocab_size - len(tokens)):
        tokens.append(f"[PAD{i}]")
        kinds.append(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")


def _permuted(weight, num_heads):
    """llama.cpp's order of the rows of queries and keys."""
    size = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, size, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _converted(name, tensor, config, architecture):
    """The tensors of a parameter in a GGUF file, by transformers' names."""
    if architecture == "gpt-oss" and ("experts" in name or "sinks" in name):
        return _of_gpt_oss(name, tensor)
    if architecture in ("llama", "granitemoe") and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        tensor = _permuted(tensor, heads)
    elif architecture.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + 1
    elif architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        tensor = tensor.T
    elif architecture == "granitemoe" and "block_sparse_moe" in name:
        block = f"blk.{name.split('.')[2]}."
        if "gate_up_proj" in name:
            gate, up = np.split(tensor, 2, 1)
            return [(f"{block}ffn_gate_exps.weight", gate), (f"{block}ffn_up_exps.weight", up)]
        return [(f"{block}{'ffn_down_exps' if 'down' in name else 'ffn_gate_inp'}.weight", tensor)]
    elif name.endswith("experts.gate_up_proj"):
        gate, up = np.split(tensor, 2, 1)
        return [(name.replace("gate_up_proj", "gate_proj"), gate), (name.replace("gate_up_proj", "up_proj"), up)]
    return [(name, tensor)]


def _of_gpt_oss(name, tensor):
    """Experts [experts, in, out] with gate and up projection in turns, their biases, and the sinks of attention."""
    block = f"blk.{name.split('.')[2]}."
    if "sinks" in name:
        return [(f"{block}attn_sinks.weight", tensor)]
    kind = "bias" if name.endswith("bias") else "weight"
    rows = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if "down" in name:
        return [(f"{block}ffn_down_exps.{kind}", rows)]
    return [(f"{block}ffn_gate_exps.{kind}", rows[:, ::2]), (f"{block}ffn_up_exps.{kind}", rows[:, 1::2])]
