"""What rules of quantization would do to a model, from its configuration alone."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from model_adapters.bridge.views import named_tensors
from model_adapters.loading.model_class import find_class, module_of, torch_dtype_of
from model_adapters.loading.model_files import ModelFiles
from model_adapters.loading.model_source import resolve
from model_adapters.quantization.rules import parse_rules
from model_adapters.quantization.selection import Selection, products_of, stored_bytes


def explain(
    model: str | os.PathLike[str] | None,
    quantization: Any,
    *,
    dtype: str = "auto",
    requantize: bool = False,
    trust_remote_code: bool = False,
    **where: Any,
) -> list[str]:
    """Returns a line for each kind of weight of `model`, and how many bytes all take.

    Args:
        model: What `resolve` accepts, or a configuration.
        quantization: What `parse_rules` accepts.
        dtype: Dtype of dense weights.
        requantize: Let the rules round weights again that are quantized in the files.
        trust_remote_code: Run the Python code of the repository.
        where: Further arguments of `resolve`.

    Raises:
        ModelNotFoundError, CheckpointError, InvalidArgumentError: in one line, as for loading.
    """
    rules = parse_rules(quantization)
    source = resolve(model, with_weights=False, with_code=trust_remote_code, **where)
    files = ModelFiles.of(source, trust_remote_code=trust_remote_code)
    files.is_made_dense(quantization, requantize)
    model_class, config = find_class(files.config, folder=source.folder, trust_remote_code=trust_remote_code)
    said: Any = config.dtype
    module = module_of(model_class, config, torch_dtype_of(dtype) or said or torch.bfloat16)
    chosen = {} if rules is None else Selection.of(module, rules).chosen
    return _lines(module, chosen, is_stored=files.settings is not None or files.gguf is not None, requantize=requantize)


def _lines(module: torch.nn.Module, chosen: dict[str, Any], *, is_stored: bool, requantize: bool) -> list[str]:
    """Returns the lines of `explain`.

    Args:
        module: The model on the meta device.
        chosen: Rule and product by name of the tensor.
        is_stored: Whether weights are quantized in the files; sizes are those of dense ones then.
        requantize: Those that no rule chooses keep their bits.
    """
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
        dense = "as it is stored" if requantize else str(tensor.dtype).removeprefix("torch.")
        does = f"stays {dense}" if found is None else str(found[0])
        key = (re.sub(r"\.\d+(?=\.)", ".*", name), str(list(tensor.shape)), does)
        kinds[key] = kinds.get(key, 0) + 1
    widths = [max((len(key[i]) for key in kinds), default=0) for i in range(2)]
    lines = [
        f"{name:{widths[0]}}  {number:>4} x {shape:{widths[1]}}  {does}"
        for (name, shape, does), number in kinds.items()
    ]
    before = "dense" if is_stored else "as they are"
    return [*lines, f"weights: {dense_bytes / 1e6:,.1f} MB {before}, {num_bytes / 1e6:,.1f} MB so"]
