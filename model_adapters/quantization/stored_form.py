"""The form that a quantized weight has on a device, known before there are numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme
from model_adapters.quantization.device_layout import accelerator_scheme
from model_adapters.quantization.quantize import scheme_of
from model_adapters.quantization.rules import QuantizationRule
from model_adapters.quantization.selection import Product
from model_adapters.sharding.model_sharding import ModelSharding
from model_adapters.sharding.quantized_sharding import abstract_quantized


@dataclasses.dataclass(frozen=True)
class StoredForm:
    """Dtypes and static part of a quantized weight.

    Attributes:
        scheme: Static part, in the plain layout until `on_platform`.
        values: Name of the dtype of the numbers.
        scale: Name of the dtype of scales and offsets.
        has_offset: Whether there are offsets.
    """

    scheme: Scheme
    values: str
    scale: str = "float32"
    has_offset: bool = False

    @classmethod
    def of_rule(cls, rule: QuantizationRule, product: Product, dtype: Any, source: str) -> StoredForm:
        """Returns the form of a weight of `dtype` that `rule` quantizes."""
        scheme = scheme_of(rule, product.num_columns, dtype, transposed=product.transposed, source=source)
        method, *numbers = rule.weight_calibration_method.lower().split(",")
        has_offset = method == "minmax" or (method == "fixed" and len(numbers) == 2)
        values = "uint4" if scheme.table is not None else rule.weight_qtype
        return cls(scheme, values, rule.scale_dtype, has_offset)

    def on_platform(self, platform: str, num_columns: int, *, multiplies_fp8: bool) -> StoredForm:
        """Returns the form on a device of `platform`: "cpu", "gpu" or "tpu"; see `device_layout`."""
        if platform == "cpu":  # on a mesh, where numbers of 4 bits lie in pairs
            return dataclasses.replace(self, values="int8") if self._has_pairs and num_columns % 2 else self
        is_fp8 = self.values.startswith("float8")
        scheme = accelerator_scheme(self.scheme, num_columns, multiplies_fp8=multiplies_fp8, is_fp8=is_fp8)
        is_int8 = scheme.source != self.scheme.source
        return dataclasses.replace(self, scheme=scheme, values="int8" if is_int8 else self.values)

    @property
    def _has_pairs(self) -> bool:
        return self.values.endswith("int4")

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes of a weight of `shape`, as model code has it."""
        scheme = self.scheme
        columns, rows = shape[-2 if scheme.transposed else -1], shape[-1 if scheme.transposed else -2]
        parts = -(-columns // scheme.group) * jnp.dtype(self.scale).itemsize * (2 if self.has_offset else 1)
        bits = 4 if self._has_pairs else 8
        return math.prod(shape[:-2]) * rows * (columns * bits // 8 + parts)

    def abstract(self, sharding: ModelSharding, name: str) -> QuantizedWeight:
        """Returns the weight `name` as shapes without values, on the mesh of `sharding`."""
        return abstract_quantized(
            sharding, name, self.scheme, jnp.dtype(self.values), jnp.dtype(self.scale), has_offset=self.has_offset
        )
