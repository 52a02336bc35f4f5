"""What rules of quantization would do to a model, from its configuration alone."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from model_adapters.bridge.views import named_tensors
from model_adapters.loading.file_names import CONFIG
from model_adapters.loading.model_class import find_class, load_config, module_of, torch_dtype_of
from model_adapters.loading.model_source import resolve
from model_adapters.quantization.rules import parse_rules
from model_adapters.quantization.selection import Selection, products_of, stored_bytes


def explain(
    model: str | os.PathLike[str] | None,
    quantization: Any,
    *,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    **where: Any,
) -> list[str]:
    """Returns a line for each kind of weight of `model`, and how many bytes all take.

    Args:
        model: What `resolve` accepts, or a configuration.
        quantization: What `parse_rules` accepts.
        dtype: Dtype of dense weights.
        trust_remote_code: Run the Python code of the repository.
        where: Further arguments of `resolve`.

    Raises:
        ModelNotFoundError, CheckpointError, InvalidArgumentError: in one line.
    """
    rules = parse_rules(quantization)
    source = resolve(model, with_weights=False, with_code=trust_remote_code, **where)
    assert source.path is not None
    file = source.path if source.kind == "config" else source.path / CONFIG
    config = load_config(file, trust_remote_code=trust_remote_code)
    model_class, config = find_class(config, folder=source.folder, trust_remote_code=trust_remote_code)
    said: Any = config.dtype
    module = module_of(model_class, config, torch_dtype_of(dtype) or said or torch.bfloat16)
    chosen = {} if rules is None else Selection.of(module, rules).chosen
    return _lines(module, chosen)


def _lines(module: torch.nn.Module, chosen: dict[str, Any]) -> list[str]:
    tensors = named_tensors(module)
    kinds: dict[tuple[str, ...], int] = {}
    dense_bytes, num_bytes, seen = 0.0, 0.0, set()
    product_names = {product.name for product in products_of(module)}
    for name, tensor in tensors.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        size = float(tensor.numel() * tensor.element_size())
        found = chosen.get(name)
        dense_bytes += size
        num_bytes += size if found is None else stored_bytes(tensor.numel(), *found)
        if found is None and name not in product_names:
            continue
        does = f"stays {str(tensor.dtype).removeprefix('torch.')}" if found is None else str(found[0])
        key = (re.sub(r"\.\d+(?=\.)", ".*", name), str(list(tensor.shape)), does)
        kinds[key] = kinds.get(key, 0) + 1
    widths = [max((len(key[i]) for key in kinds), default=0) for i in range(2)]
    lines = [
        f"{name:{widths[0]}}  {number:>4} x {shape:{widths[1]}}  {does}"
        for (name, shape, does), number in kinds.items()
    ]
    return [*lines, f"weights: {dense_bytes / 1e6:,.1f} MB as they are, {num_bytes / 1e6:,.1f} MB so"]
