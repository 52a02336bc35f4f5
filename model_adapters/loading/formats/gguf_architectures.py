"""Architectures of GGUF files that transformers' tables lack or read in part.

An architecture here is a class of transformers, the keys of the header that its configuration is made of, and what
llama.cpp's converter did to its tensors (``conversion/`` of github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers import modeling_gguf_pytorch_utils as hf_gguf

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading.formats.gguf_file import GgufFile
from model_adapters.loading.formats.quantized_tensor import QuantizedTensor

# Parameters of experts in transformers' classes, by releases, and the tensors of a file that each is made of.
_EXPERT_PARAMETERS = (
    (r"(?:mlp|block_sparse_moe)\.experts\.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
    (r"mlp\.experts\.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias")),
    (r"mlp\.experts\.down_proj_bias", ("ffn_down_exps.bias",)),
    (r"block_sparse_moe\.input_linear\.weight", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
    (r"block_sparse_moe\.(?:experts\.down_proj|output_linear\.weight)", ("ffn_down_exps.weight",)),
    (r"block_sparse_moe\.router\.(?:layer\.)?weight", ("ffn_gate_inp.weight",)),
)


class Experts(hf_gguf.TensorProcessor):
    """Joins gate and up projections of experts, which the file has apart, in one parameter."""

    def perform_fallback_tensor_mapping(self, names: dict[str, str], suffix: str, prefix: str, name: str) -> None:
        """Adds the tensors of a parameter that the package's table of names lacks."""
        for pattern, tensors in _EXPERT_PARAMETERS:
            if found := re.fullmatch(rf"model\.layers\.(\d+)\.{pattern}", name):
                names.update({f"blk.{found[1]}.{tensor}": prefix + name for tensor in tensors})


class LlamaExperts(Experts, hf_gguf.LlamaTensorProcessor):
    """Joins experts, and undoes llama.cpp's order of the rows of queries and keys."""


class GptOss(Experts):
    """Makes experts [experts, in, out] with rows of gate and up projection in turns."""

    @staticmethod
    def fuse(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns one parameter of tensors ``[experts, out, in]``, or of biases ``[experts, out]``."""
        joined = torch.cat(list(tensors), 1)
        num_rows = tensors[0].shape[1]
        turns = torch.arange(num_rows * len(tensors)).reshape(len(tensors), num_rows).T.flatten()
        if isinstance(joined, QuantizedTensor):
            joined = joined.with_parts(joined.parts.by_row(lambda part: part.index_select(1, turns)))
        else:
            joined = joined.index_select(1, turns)
        return joined.mT if joined.ndim > 2 else joined


class Falcon(hf_gguf.TensorProcessor):
    """Orders Falcon's fused projection: the file has all queries, then keys, then values."""

    def process(self, weights: np.ndarray[Any, Any], name: str, **kwargs: Any) -> Any:
        """Returns the rows in transformers' order: the queries of each key-value head with it."""
        if "attn_qkv" in name:
            heads, groups = self.config["num_attention_heads"], self.config["num_kv_heads"]
            size = weights.shape[0] // (heads + 2 * groups)
            split = np.split(weights, [heads * size, (heads + groups) * size])
            by_group = [part.reshape(groups, -1, *weights.shape[1:]) for part in split]
            weights = np.concatenate(by_group, 1).reshape(weights.shape)
        return hf_gguf.GGUFTensor(weights, name, {})


@dataclass(frozen=True)
class Architecture:
    """An architecture that transformers' table lacks.

    Attributes:
        model_type: transformers' name of the model type.
        keys: Attributes of the configuration by keys of the header, beside `_SHARED_KEYS`.
        processor: Class that undoes what the converter did to tensors.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    processor: type[hf_gguf.TensorProcessor] = hf_gguf.TensorProcessor


_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}

ARCHITECTURES = {
    "cohere2": Architecture("cohere2", {"logit_scale": "logit_scale"}),
    "command-r": Architecture("cohere", {"logit_scale": "logit_scale"}),
    "ernie4_5": Architecture("ernie4_5"),
    "exaone4": Architecture("exaone4"),
    "gemma": Architecture("gemma", processor=hf_gguf.Gemma2TensorProcessor),
    "glm4": Architecture("glm4"),
    "gpt-oss": Architecture("gpt_oss", _LOCAL_EXPERTS, GptOss),
    "granite": Architecture("granite", _GRANITE, processor=hf_gguf.LlamaTensorProcessor),
    "granitemoe": Architecture("granitemoe", _GRANITE | _LOCAL_EXPERTS, processor=LlamaExperts),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "olmo2": Architecture("olmo2"),
    "phi2": Architecture("phi"),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", processor=hf_gguf.LlamaTensorProcessor),
}
_MIXTRAL = Architecture("mixtral", _LOCAL_EXPERTS, processor=LlamaExperts)
_OLMO3 = Architecture("olmo3")

_SHARED_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


def architecture_of(file: GgufFile) -> Architecture | None:
    """Returns the architecture of `file`; None where transformers' table has it."""
    name, given = file.architecture, file.metadata.get
    if name == "llama" and given("llama.expert_count"):
        return _MIXTRAL
    if name == "olmo2" and given("olmo2.attention.sliding_window"):
        return _OLMO3
    return ARCHITECTURES.get(name)


def config_keys(architecture: Architecture) -> set[str]:
    """Returns the keys of the header that the configuration of an architecture is made of."""
    return {*_SHARED_KEYS, *architecture.keys}


def config_values(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Returns the arguments of the configuration's class."""
    keys = {**_SHARED_KEYS, **architecture.keys}
    given = {name: file.metadata.get(f"{file.architecture}.{key}") for key, name in keys.items()}
    values: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None or name == "sliding_window"
    }
    for key, name in _TOKENS.items():
        values[name] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if architecture.model_type == "exaone4" and values["sliding_window"] is None:  # its class divides by the pattern
        values["layer_types"] = ["full_attention"] * (values.get("num_hidden_layers") or 1)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    theta = file.metadata.get(f"{file.architecture}.rope.freq_base", 10000.0)  # llama.cpp's default
    return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


# Model types with rotary embeddings of a part of the head.
_PARTIAL_ROTARY = ("glm4", "gpt_neox", "nemotron", "phi", "phi3", "stablelm")
# Layers of the Gemmas whose queries are scaled by the size that each head would have, not by the one it has.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3_text", 62)}


def complete(file: GgufFile, config: PreTrainedConfig) -> None:
    """Sets what transformers' tables leave at a default of another model.

    Raises:
        UnsupportedModelError: rotary embeddings of a part of the head in a class that has none.
    """
    name, kind = file.architecture, config.model_type
    _set_frequencies(file, config)
    if (kind, config.num_hidden_layers) in _SCALED_BY_WIDTH:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    elif kind in ("gemma2", "gemma3_text"):
        config.query_pre_attn_scalar = config.head_dim
    if kind == "falcon":
        config.num_kv_heads = file.metadata.get("falcon.attention.head_count_kv", config.num_attention_heads)
        config.new_decoder_architecture = "blk.0.attn_norm_2.weight" in file.tensors
        config.multi_query = config.num_kv_heads == 1
    for bias, tensor in (("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_up.bias"), ("use_bias", "attn_q.bias")):
        if hasattr(config, bias):
            setattr(config, bias, f"blk.0.{tensor}" in file.tensors)
    window = file.metadata.get(f"{name}.attention.sliding_window")
    if window and hasattr(config, "sliding_window"):
        config.sliding_window = window
    pattern = file.metadata.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(pattern, list) and getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention" if each else "full_attention" for each in pattern]


def _set_frequencies(file: GgufFile, config: PreTrainedConfig) -> None:
    """Sets the base of rotary frequencies and the part of a head that is rotated."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    given, prefix = file.metadata.get, f"{file.architecture}.rope"
    bases = {"full_attention": given(f"{prefix}.freq_base"), "sliding_attention": given(f"{prefix}.freq_base_swa")}
    for kind, base in bases.items():
        part = rope.get(kind) or (rope if kind == "full_attention" else None)
        if part and base:
            part["rope_theta"] = base
    dimensions = given(f"{prefix}.dimension_count")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if dimensions and dimensions != size:
        if config.model_type not in _PARTIAL_ROTARY:
            raise UnsupportedModelError(
                f"{file.path} rotates {dimensions} of {size} numbers of a head, which {config.model_type} does not: "
                "use the model's safetensors folder"
            )
        rope["partial_rotary_factor"] = dimensions / size
