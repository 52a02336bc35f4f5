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
from transformers import modeling_gguf_pytorch_utils as hf_gguf

from model_adapters.loading.formats.gguf_file import GgufFile
from model_adapters.loading.formats.quantized_tensor import QuantizedTensor

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.experts\.gate_up_proj|block_sparse_moe\.input_linear\.weight)")
_EXPERTS_BIAS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj_bias")
_ROUTER = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.router\.layer\.weight")
_EXPERTS_DOWN = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.output_linear\.weight")


class Experts(hf_gguf.TensorProcessor):
    """Tensors of experts: the file has gate and up projection apart, transformers in one parameter."""

    def perform_fallback_tensor_mapping(self, names: dict[str, str], suffix: str, prefix: str, name: str) -> None:
        """Adds the tensors of a parameter that the package's table of names lacks."""
        if found := _EXPERTS.fullmatch(name):
            for part in ("gate", "up"):
                names[f"blk.{found[1]}.ffn_{part}_exps.weight"] = prefix + name
        elif found := _EXPERTS_BIAS.fullmatch(name):
            for part in ("gate", "up") if found[2] == "gate_up" else ("down",):
                names[f"blk.{found[1]}.ffn_{part}_exps.bias"] = prefix + name
        elif found := _ROUTER.fullmatch(name):
            names[f"blk.{found[1]}.ffn_gate_inp.weight"] = prefix + name
        elif found := _EXPERTS_DOWN.fullmatch(name):
            names[f"blk.{found[1]}.ffn_down_exps.weight"] = prefix + name


class LlamaExperts(Experts, hf_gguf.LlamaTensorProcessor):
    """Experts, and the rows of queries and keys in llama.cpp's order."""


class GptOss(Experts):
    """Experts that transformers has as [experts, in, out], gate and up projection in turns."""

    @staticmethod
    def fuse(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns one parameter of tensors ``[experts, out, in]``, or of biases ``[experts, out]``."""
        if all(isinstance(tensor, QuantizedTensor) for tensor in tensors):
            parts = [tensor.parts for tensor in tensors]  # type: ignore[attr-defined]
            if all(each.kind == parts[0].kind for each in parts):
                joined = parts[0].by_row(lambda part: part)
                for name in ("values", "scale", "offset"):
                    if (first := getattr(parts[0], name)) is not None:
                        turns = torch.stack([getattr(each, name) for each in parts], 2)
                        object.__setattr__(joined, name, turns.flatten(1, 2) if len(parts) > 1 else first)
                return tensors[0].with_parts(joined).mT  # type: ignore[attr-defined, no-any-return]
        stacked = torch.stack([torch.as_tensor(tensor) for tensor in tensors], 2).flatten(1, 2)
        return stacked.mT.contiguous() if stacked.ndim > 2 else stacked


class Falcon(hf_gguf.TensorProcessor):
    """Falcon's fused projection, of which the file has all queries first, then keys, then values."""

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
        settings: Attributes that all models of the architecture share and no file says.
        processor: Class that undoes what the converter did to tensors.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
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
    "gpt-oss": Architecture("gpt_oss", _LOCAL_EXPERTS, processor=GptOss),
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
    values = {name: value for name, value in given.items() if value is not None or name == "sliding_window"}
    for key, name in _TOKENS.items():
        values[name] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    theta = file.metadata.get(f"{file.architecture}.rope.freq_base", 10000.0)  # llama.cpp's default
    return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": theta}, **architecture.settings}
