"""The weights that a configuration says are quantized, and their form, without the files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading.formats.compressed_tensors import scheme_of_module
from model_adapters.loading.formats.gptq import settings_of_module
from model_adapters.loading.formats.settings import QuantizationSettings, matches
from model_adapters.ops.quantized_weight import FP4_DOUBLED, NF4, Scheme
from model_adapters.quantization.rules import ROUTERS
from model_adapters.quantization.selection import Product, products_of
from model_adapters.quantization.stored_form import StoredForm


class _Numbers(NamedTuple):
    """Form of stored numbers.

    It has their dtype and bits, columns of a group (None: of a row), offsets, and a table that they index.
    """

    values: str
    bits: int = 8
    group: int | None = None
    has_offset: bool = False
    table: tuple[float, ...] | None = None


def _of_fp8(path: str, settings: QuantizationSettings) -> _Numbers:
    block = settings.values.get("weight_block_size")
    return _Numbers("float8_e4m3fn", group=int(block[1]) if block else None)


def _of_integers(bits: int, group: int, *, has_offset: bool) -> _Numbers:
    kind = "int8" if bits == 8 else "uint4" if has_offset else "int4"
    return _Numbers(kind, 8 if bits == 8 else 4, None if group == -1 else group, has_offset)


def _of_gptq(path: str, settings: QuantizationSettings) -> _Numbers:
    bits, group = settings_of_module(path, settings)
    return _of_integers(bits, group, has_offset=not settings.values.get("sym", True))


def _of_awq(path: str, settings: QuantizationSettings) -> _Numbers:
    values = settings.values
    group = int(values.get("group_size", values.get("q_group_size", 128)))
    return _of_integers(4, group, has_offset=bool(values.get("zero_point", True)))


_FP4 = tuple(map(float, FP4_DOUBLED))


def _of_compressed_tensors(path: str, settings: QuantizationSettings) -> _Numbers:
    weights = scheme_of_module(path, settings).get("weights") or {}
    bits, group = int(weights.get("num_bits", 8)), weights.get("group_size")
    block = weights.get("block_structure") if weights.get("strategy") == "block" else None
    group = int(block[1]) if block else -1 if group is None else int(group)
    if weights.get("type") == "float":
        return (
            _Numbers("uint4", 4, group, table=_FP4)
            if bits == 4
            else _Numbers("float8_e4m3fn", group=None if group == -1 else group)
        )
    return _of_integers(bits, group, has_offset=not weights.get("symmetric", True))


def _of_bitsandbytes(path: str, settings: QuantizationSettings) -> _Numbers:
    if not settings.values.get("load_in_4bit"):
        return _Numbers("int8")
    return _Numbers("uint4", 4, 64, table=NF4)


def _of_hqq(path: str, settings: QuantizationSettings) -> _Numbers:
    params = (settings.values.get("quant_config") or {}).get("weight_quant_params") or {}
    return _of_integers(int(params.get("nbits", 4)), int(params.get("group_size", 64)), has_offset=True)


_FORMS: dict[str, Callable[[str, QuantizationSettings], _Numbers]] = {
    "awq": _of_awq,
    "bitsandbytes": _of_bitsandbytes,
    "compressed-tensors": _of_compressed_tensors,
    "fbgemm_fp8": _of_fp8,
    "fp8": _of_fp8,
    "gptq": _of_gptq,
    "hqq": _of_hqq,
    "mxfp4": lambda path, settings: _Numbers("uint4", 4, 32, table=_FP4),
    "mxfp8": lambda path, settings: _Numbers("float8_e4m3fn", group=32),
}
"""Of each method: the numbers of the module at a path."""


def declared_forms(module: PreTrainedModel, settings: QuantizationSettings) -> dict[str, StoredForm]:
    """Returns, by name, the form of each weight of `module` that a checkpoint has quantized.

    Raises:
        UnsupportedModelError: The configuration does not say how its weights are quantized.
    """
    form = _FORMS.get(settings.method)
    if form is None:
        raise UnsupportedModelError(
            f"{settings.file}: {settings.method} says how weights are quantized in its weight files alone; plan the "
            "model with --quantization int8 or int4"
        )
    dtype = str(module.dtype).removeprefix("torch.")
    found = {}
    for product in products_of(module):
        if _is_quantized(module, product, settings):
            numbers = form(product.path, settings)
            scheme = Scheme(
                numbers.bits,
                min(numbers.group or product.num_columns, product.num_columns),
                dtype=dtype,
                transposed=product.transposed,
                source=settings.method,
                table=numbers.table,
            )
            found[product.name] = StoredForm(scheme, numbers.values, has_offset=numbers.has_offset)
    return found


def _is_quantized(module: PreTrainedModel, product: Product, settings: QuantizationSettings) -> bool:
    if product.op_name == "embedding" or any(matches(pattern, product.path) for pattern in settings.left_out):
        return False
    if settings.method == "mxfp4":
        return product.op_name == "ragged_dot"
    head: Any = module.get_output_embeddings()
    is_head = isinstance(head, torch.nn.Module) and module.get_submodule(product.path) is head
    return not is_head and re.fullmatch(ROUTERS, product.path) is None
