"""Writes quantized weights as compressed-tensors, for vLLM and transformers.

https://github.com/vllm-project/compressed-tensors: ``int-quantized`` and ``float-quantized`` hold a number in each
byte; ``pack-quantized`` holds integers of 4 or 8 bits in int32, unsigned, the lowest bits first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import to_torch_tensor
from model_adapters.errors import UnsupportedArgumentError
from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme


def format_of(scheme: Scheme, *, is_float: bool) -> str:
    """Returns the name of the format for weights of `scheme`."""
    if is_float:
        return "float-quantized"
    return "int-quantized" if scheme.act_dtype != "none" and scheme.bits == 8 else "pack-quantized"


def tensors_of(path: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Returns the tensors of the module at `path` by name.

    Raises:
        UnsupportedArgumentError: the format has no place for this kind of weight.
    """
    plain = weight.plain()
    num_columns = plain.num_columns
    if plain.offset is not None or plain.columns is not None or plain.ndim != 2 or plain.scheme.transposed:
        raise UnsupportedArgumentError(
            f"{path}: expected a symmetric weight [out, in] for compressed-tensors, got one with offsets, an order of "
            "columns or experts; choose absmax, rms or fixed, or leave it dense"
        )
    if plain.scheme.group < num_columns and num_columns % plain.scheme.group:
        raise UnsupportedArgumentError(
            f"{path}: expected groups that divide its {num_columns} columns, got {plain.scheme.group}; give another "
            "tile_size"
        )
    is_float = plain.has_float_numbers
    scale = to_torch_tensor(plain.scale.astype(jnp.dtype(plain.scheme.dtype)))
    made = {f"{path}.weight_scale": scale}
    if is_float:
        bits = torch.from_numpy(np.array(plain.values).view(np.uint8))
        return made | {f"{path}.weight": bits.view(torch.float8_e4m3fn)}
    values = np.array(plain.values.astype(jnp.int8))
    if format_of(plain.scheme, is_float=False) == "int-quantized":
        return made | {f"{path}.weight": torch.from_numpy(values)}
    made[f"{path}.weight_packed"] = torch.from_numpy(packed(values, plain.scheme.bits))
    made[f"{path}.weight_shape"] = torch.tensor(values.shape, dtype=torch.int64)
    return made


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns int32[out, ceil(in / (32 / bits))] of int8[out, in].

    Numbers are unsigned, the lowest bits first.
    """
    per_word = 32 // bits
    unsigned = (values.astype(np.int32) + (1 << bits - 1)).astype(np.uint32)
    padded = np.pad(unsigned, ((0, 0), (0, -values.shape[1] % per_word)))
    words = padded.reshape(len(values), -1, per_word) << (np.arange(per_word, dtype=np.uint32) * bits)
    return np.bitwise_or.reduce(words, axis=2).astype(np.uint32).view(np.int32)


def quantization_config(weights: Mapping[str, QuantizedWeight], ignore: list[str]) -> dict[str, Any]:
    """Returns the ``quantization_config`` of ``config.json``.

    Args:
        weights: Quantized weights by the path of their module.
        ignore: Paths of linear layers that stay dense.
    """
    groups: dict[str, dict[str, Any]] = {}
    for path, weight in weights.items():
        described = _group(weight)
        found = groups.setdefault(str(described), {"targets": [], **described})
        found["targets"].append(path)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups.values())},
        "ignore": ignore,
    }


def _group(weight: QuantizedWeight) -> dict[str, Any]:
    """Returns what modules of one group have in common."""
    scheme = weight.scheme
    is_float = weight.has_float_numbers
    is_grouped = scheme.group < weight.num_columns
    numbers: dict[str, Any] = {
        "num_bits": 8 if is_float else scheme.bits,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": "group" if is_grouped else "channel",
        "group_size": scheme.group if is_grouped else None,
        "dynamic": False,
    }
    acts = {"num_bits": 8, "type": numbers["type"], "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "weights": numbers,
        "input_activations": None if scheme.act_dtype == "none" else acts,
        "output_activations": None,
        "format": format_of(scheme, is_float=is_float),
    }
