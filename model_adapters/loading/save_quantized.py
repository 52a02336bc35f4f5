"""Writes a model's folder with quantized weights, for transformers and vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging as hf_logging

from model_adapters.bridge.views import to_torch_tensor
from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.loader import load_model
from model_adapters.loading.progress import Advance, Progress, SilentProgress
from model_adapters.loading.weight_sink import replaced
from model_adapters.ops.quantized_weight import QuantizedWeight
from model_adapters.quantization.compressed_tensors import quantization_config, tensors_of
from model_adapters.quantization.rules import rules_for_files


def save_quantized(
    model: Any,
    folder: str | os.PathLike[str],
    quantization: Any,
    *,
    progress: Progress | None = None,
    **load_options: Any,
) -> str:
    """Writes `model` with quantized linear layers into `folder`, as compressed-tensors.

    Experts in one tensor, embedding tables and tied heads stay dense. Presets leave the head dense too.

    Args:
        model: What `load_model` accepts.
        folder: A new or empty folder.
        quantization: What `parse_rules` accepts.
        progress: Shown for download, load and writing.
        load_options: Further arguments of `load_model`.

    Returns:
        What was quantized, in one line.

    Raises:
        InvalidArgumentError: a folder with files in it, or that cannot be written; rules that do not fit.
        TorchaxServeError: the model cannot be loaded.
    """
    out = Path(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgumentError(f"OUT: expected a new or empty folder, got {out}; choose another")
    rules = rules_for_files(quantization)
    if rules is None:
        raise InvalidArgumentError("quantization: expected a preset, a file or rules, got none; choose int8 or int4")
    shown = progress or SilentProgress()
    loaded = load_model(model, quantization=rules, progress=shown, **load_options)
    module = loaded.module
    quantized = {
        name.removesuffix(".weight"): weight
        for name, weight in loaded.weights.items()
        if isinstance(weight, QuantizedWeight)
    }
    linear = [path for path, child in module.named_modules() if isinstance(child, torch.nn.Linear)]
    names = module.state_dict().keys()
    state: dict[str, torch.Tensor] = {}
    for name, weight in loaded.weights.items():
        if (source := module.all_tied_weights_keys.get(name)) and loaded.weights.get(source) is weight:
            continue  # written under the name of its source alone
        if isinstance(weight, QuantizedWeight):
            state |= tensors_of(name.removesuffix(".weight"), weight)
        elif name in names:
            state[name] = to_torch_tensor(weight)  # type: ignore[arg-type]  # packed weights are made by serve alone
    ignore = [path for path in linear if path not in quantized]
    module.config.quantization_config = quantization_config(quantized, ignore)
    parts = [part for part in (loaded.tokenizer(), loaded.processor()) if part is not None]
    _write(out, module, state, parts, shown)
    return loaded.report.quantization


def _write(out: Path, module: Any, state: dict[str, torch.Tensor], parts: list[Any], shown: Progress) -> None:
    """Writes tensors, configuration and `parts`; raises InvalidArgumentError if it cannot."""
    try:
        with shown.stage("writing", None, "items") as advance, replaced(hf_logging, "tqdm", _counting(advance)):
            module.save_pretrained(out, state_dict=state)
        for part in parts:
            part.save_pretrained(out)
    except (OSError, SafetensorError) as error:
        raise InvalidArgumentError(
            f"OUT: expected a folder that can be written, got {out} ({error}); choose another"
        ) from error


def _counting(advance: Advance) -> Callable[..., Iterator[Any]]:
    """Returns what takes the place of transformers' bar over the files that it writes."""

    def count(items: Iterable[Any], **ignored: Any) -> Iterator[Any]:
        for item in items:
            yield item
            advance(1)

    return count
