"""Quantizes weights while a model is loaded, one tensor after the other."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.quantized_weight import QuantizedWeight
from model_adapters.quantization.device_layout import lay_out
from model_adapters.quantization.quantize import quantize_weight
from model_adapters.quantization.rules import QuantizationRules
from model_adapters.quantization.selection import Selection
from model_adapters.sharding.model_sharding import ModelSharding
from model_adapters.sharding.quantized_sharding import put_quantized


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a weight lost when it was quantized again.

    Attributes:
        was: Its form before, such as "awq int4".
        error: Sum of squared differences to the numbers before.
        size: Sum of squares of those numbers.
    """

    was: str
    error: float
    size: float


@jax.jit
def _squares(weight: jax.Array, made: QuantizedWeight) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of squared differences and of squares of a weight, float32[] each."""
    dense = weight.astype(jnp.float32)
    return jnp.sum(jnp.square(made.unpacked().astype(jnp.float32) - dense)), jnp.sum(jnp.square(dense))


def describe_losses(losses: Sequence[Loss]) -> str:
    """Returns in one line what weights lost that were quantized again; "" for none."""
    if not losses:
        return ""
    error = math.sqrt(sum(loss.error for loss in losses) / (sum(loss.size for loss in losses) or 1.0))
    forms = ", ".join(sorted({loss.was for loss in losses}))
    return (
        f"{len(losses)} weights quantized again, which were {forms}: numbers off by {100 * error:.2g} % (root mean "
        "square)"
    )


@dataclasses.dataclass(frozen=True)
class WeightQuantizer:
    """Quantizes the tensors of one load that the rules choose.

    Attributes:
        selection: What the rules choose.
        sharding: How the weights lie on a mesh; None is one device.
        losses: What was lost of weights that were quantized before, filled as they are quantized again.
    """

    selection: Selection
    sharding: ModelSharding | None = None
    losses: list[Loss] = dataclasses.field(default_factory=list)

    def takes(self, name: str) -> bool:
        """Tells whether the tensor `name` is to be quantized."""
        return name in self.selection.chosen

    def __call__(self, name: str, weight: jax.Array, *, was: str | None = None) -> QuantizedWeight:
        """Returns the tensor `name`, a dense array on a device, quantized.

        The dense array is not used afterwards.

        Args:
            name: Name of the tensor.
            weight: Its numbers.
            was: Form in which the checkpoint has them, if they are quantized there.

        Raises:
            InvalidArgumentError: it holds NaN or infinity.
        """
        rule, product = self.selection.on_mesh(name, self.sharding)
        made = quantize_weight(name, weight, rule, transposed=product.transposed, source=self.selection.rules.name)
        if was is not None:
            error, size = _squares(weight, made)
            self.losses.append(Loss(was, float(error), float(size)))
        made = lay_out(made, on_mesh=self.sharding is not None)
        return jax.block_until_ready(made if self.sharding is None else put_quantized(self.sharding, name, made))


def quantize_weights(module: torch.nn.Module, weights: dict[str, Any], rules: QuantizationRules) -> None:
    """Puts quantized weights in the place of those arrays in `weights` that `rules` choose.

    Args:
        module: The model.
        weights: Dense arrays by name, tied names sharing one; changed in place. Those that are quantized stay.
        rules: Which, and how.

    Raises:
        InvalidArgumentError: rules that do not fit `module`; a weight with NaN or infinity.
    """
    quantizer = WeightQuantizer(Selection.of(module, rules))
    made: dict[int, tuple[jax.Array, QuantizedWeight]] = {}  # the array is held: its identity must stay unique
    for name, array in list(weights.items()):
        if quantizer.takes(name) and not isinstance(array, QuantizedWeight):
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
    bits = (scheme.numbers or f"{weight.values.dtype}") if weight.has_float_numbers else f"int{scheme.bits}"
    group = "one scale a row" if scheme.group >= weight.num_columns else f"groups of {scheme.group}"
    acts = "" if scheme.act_dtype == "none" else f", activations {scheme.act_dtype}"
    return f"{bits} ({group}{acts})"
