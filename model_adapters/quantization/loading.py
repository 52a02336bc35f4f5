"""Quantizes weights while a model is loaded, one tensor after the other."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.quantized_weight import QuantizedWeight
from model_adapters.quantization.cpu_layout import lay_out
from model_adapters.quantization.quantize import quantize_weight
from model_adapters.quantization.rules import QuantizationRules
from model_adapters.quantization.selection import Selection
from model_adapters.sharding.model_sharding import ModelSharding


@dataclasses.dataclass(frozen=True)
class WeightQuantizer:
    """Quantizes the tensors of one load that the rules choose.

    Attributes:
        selection: What the rules choose.
        sharding: How the weights lie on a mesh; None is one device.
    """

    selection: Selection
    sharding: ModelSharding | None = None

    def takes(self, name: str) -> bool:
        """Tells whether the tensor `name` is to be quantized."""
        return name in self.selection.chosen

    def __call__(self, name: str, weight: jax.Array) -> QuantizedWeight:
        """Returns the tensor `name`, a dense array on a device, quantized; the dense array is not used afterwards.

        Raises:
            InvalidArgumentError: it holds NaN or infinity.
        """
        rule, product = self.selection.chosen[name]
        rules, mesh = self.selection.rules, self.sharding
        if mesh is not None and rules.is_preset and mesh.moves_columns(name, transposed=product.transposed):
            rule = dataclasses.replace(rule, tile_size=None)
        made = quantize_weight(name, weight, rule, transposed=product.transposed, source=rules.name)
        return jax.block_until_ready(lay_out(made) if mesh is None else mesh.put_quantized(name, made))


def quantize_weights(module: torch.nn.Module, weights: dict[str, Any], rules: QuantizationRules) -> None:
    """Puts quantized weights in the place of those arrays in `weights` that `rules` choose.

    Args:
        module: The model.
        weights: Dense arrays by name, tied names sharing one; changed in place.
        rules: Which, and how.

    Raises:
        InvalidArgumentError: rules that do not fit `module`; a weight with NaN or infinity.
    """
    quantizer = WeightQuantizer(Selection.of(module, rules))
    made: dict[int, tuple[jax.Array, QuantizedWeight]] = {}  # the array is held: its identity must stay unique
    for name, array in list(weights.items()):
        if quantizer.takes(name):
            if id(array) not in made:
                made[id(array)] = array, quantizer(name, array)
            weights[name] = made[id(array)][1]


def describe_weights(weights: Weights, num_dense: int | None = None) -> str:
    """Returns what is stored at how many bits, in one line; "" if nothing is quantized.

    Args:
        weights: By name; tied ones count once.
        num_dense: Linear layers and experts that stay dense, if known.
    """
    quantized = {id(weight): weight for weight in weights.values() if isinstance(weight, QuantizedWeight)}
    if not quantized:
        return ""
    kinds: collections.Counter[str] = collections.Counter()
    for weight in quantized.values():
        kinds[_kind(weight)] += 1
    parts = [f"{number} weights {kind}" for kind, number in kinds.most_common()]
    num_bytes = sum(weight.nbytes for weight in quantized.values())
    num_elements = sum(weight.size for weight in quantized.values())
    parts.append(f"{8 * num_bytes / num_elements:.2f} bits a number")
    if num_dense:
        parts.append(f"{num_dense} linear layers dense")
    return "; ".join(parts)


def _kind(weight: QuantizedWeight) -> str:
    scheme = weight.scheme
    bits = f"{weight.values.dtype}" if jnp.issubdtype(weight.values.dtype, jnp.floating) else f"int{scheme.bits}"
    group = "one scale a row" if scheme.group >= weight.num_columns else f"groups of {scheme.group}"
    acts = "" if scheme.act_dtype == "none" else f", activations {scheme.act_dtype}"
    return f"{bits} ({group}{acts})"
