"""Rotary embeddings of a GGUF file, which transformers' table of keys leaves out."""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedConfig

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading.formats.gguf_blocks import plain_tensor
from model_adapters.loading.formats.gguf_file import GgufFile

_LLAMA3_FACTORS = (8.0, 32.0, 4.0, 16.0)
"""Factors that models with Llama 3's frequencies have."""


def set_rope(file: GgufFile, config: PreTrainedConfig) -> None:
    """Sets how positions are scaled.

    The file has it in the keys ``rope.scaling.*`` and the tensors ``rope_*``.

    Raises:
        UnsupportedModelError: a scaling that is not read.
    """
    prefix = f"{file.architecture}.rope.scaling."
    kind = file.metadata.get(f"{prefix}type", "none")
    factor = file.metadata.get(f"{prefix}factor") or file.metadata.get(f"{file.architecture}.rope.scale_linear")
    if "rope_factors_long.weight" in file.tensors:
        kind = "longrope"
    if "rope_freqs.weight" in file.tensors:
        _update(config, _llama3(file, config))
    elif kind == "linear" and factor:
        _update(config, {"rope_type": "linear", "factor": float(factor)})
    elif kind == "yarn" and factor:
        _update(config, _yarn(file, config, float(factor)))
    elif kind == "longrope":
        _update(config, _longrope(file, config))
    elif kind != "none" and factor not in (None, 0, 1, 1.0):
        raise UnsupportedModelError(
            f"{file.path} scales positions by {kind!r}, which is not read: use the model's safetensors folder"
        )


def _update(config: PreTrainedConfig, scaling: dict[str, object]) -> None:
    rope = dict(config.rope_parameters)
    if "full_attention" in rope:  # Gemma 3 scales the layers without a window alone
        rope["full_attention"] = {**rope["full_attention"], **scaling}
    else:
        rope |= scaling
    config.rope_parameters = rope


def _tensor(file: GgufFile, name: str) -> torch.Tensor:
    entry = file.tensors[name]
    with file.path.open("rb") as stream:
        stream.seek(entry.offset)
        data = torch.frombuffer(bytearray(stream.read(entry.num_bytes)), dtype=torch.uint8)
    return plain_tensor(data, entry.type_name, entry.shape).float()


def _llama3(file: GgufFile, config: PreTrainedConfig) -> dict[str, object]:
    """Returns Llama 3's scaling, of which the file has the factor of each frequency."""
    found = _tensor(file, "rope_freqs.weight")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    for factor in _LLAMA3_FACTORS:
        smooth = ((8192 / wavelengths - 1.0) / (4.0 - 1.0)).clamp(0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    raise UnsupportedModelError(
        f"{file.path} has factors of rotary frequencies (rope_freqs) that are not Llama 3's, which are not read: "
        "use the model's safetensors folder"
    )


def _yarn(file: GgufFile, config: PreTrainedConfig, factor: float) -> dict[str, object]:
    prefix = f"{file.architecture}.rope.scaling."
    betas = {name: file.metadata.get(f"{prefix}yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.metadata.get(f"{prefix}original_context_length"),
        **{name: value for name, value in betas.items() if value is not None},
        **({"truncate": False} if config.model_type == "gpt_oss" else {}),  # which no file says
    }


def _longrope(file: GgufFile, config: PreTrainedConfig) -> dict[str, object]:
    prefix = f"{file.architecture}.rope.scaling."
    original = file.metadata.get(f"{prefix}original_context_length")
    config.original_max_position_embeddings = original
    return {
        "rope_type": "longrope",
        "long_factor": _tensor(file, "rope_factors_long.weight").tolist(),
        "short_factor": _tensor(file, "rope_factors_short.weight").tolist(),
        "original_max_position_embeddings": original,
        "factor": config.max_position_embeddings / original,
        "attention_factor": file.metadata.get(f"{prefix}attn_factor"),
    }
