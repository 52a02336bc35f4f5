"""Bytes that a decode step must read: weights, and keys and values of the tokens so far."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedModel

from model_adapters.bridge.views import named_tensors
from model_adapters.ops.compressed_weight import Weights


@dataclasses.dataclass(frozen=True)
class CacheLayer:
    """Cache of one layer for one row of the batch.

    Attributes:
        position_bytes: Bytes of keys and values per token.
        window: Largest number of tokens it attends to, the newest included; None for all.
        state_bytes: Bytes of a recurrent state, which each step reads and writes.
    """

    position_bytes: float
    window: int | None
    state_bytes: float

    def read_bytes(self, length: int) -> float:
        """Returns the bytes of traffic for the newest of `length` tokens."""
        seen = length if self.window is None else min(length, self.window)
        return self.position_bytes * seen + 2 * self.state_bytes


def cache_layers(cache: Any, length: int) -> tuple[CacheLayer, ...]:
    """Measures the layers of a transformers cache that holds `length` tokens per row."""
    return tuple(_cache_layer(layer, length) for layer in cache.layers)


def _cache_layer(layer: Any, length: int) -> CacheLayer:
    position_bytes, window, state_bytes = 0.0, None, 0.0
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.numel():
        batch, num_stored = keys.shape[0], keys.shape[-2]
        position_bytes = (keys.nbytes + values.nbytes) / batch / num_stored
        # A sliding layer drops the tokens that the next one cannot attend to.
        window = None if num_stored == length else num_stored + 1
    for name in ("conv_states", "recurrent_states"):
        for state in (getattr(layer, name, None) or {}).values():
            if isinstance(state, torch.Tensor):
                state_bytes += state.nbytes / state.shape[0]
    return CacheLayer(position_bytes, window, state_bytes)


def weight_bytes_per_step(module: PreTrainedModel, weights: Weights, batch: int) -> float:
    """Returns the bytes of weights that a decode step of `batch` rows reads, tied ones once.

    Of a table that is only looked up in, one row per row of the batch counts. Of experts, those that the step is
    expected to use if every token chooses evenly among them: ``1 - (1 - k / n)^batch`` of n, k chosen by each.
    """
    tables, others = _by_use(module)
    used = _part_of_experts(module.config.get_text_config(), batch)
    total, counted = 0.0, set()
    for name, array in weights.items():
        if id(array) in counted or (name in tables and any(weights[other] is array for other in others)):
            continue
        counted.add(id(array))
        if name in tables:
            total += batch * array.nbytes / array.shape[0]
        else:
            total += array.nbytes * (used if ".experts." in name else 1)
    return total


def _by_use(module: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Returns the names of embedding tables, and those of all other tensors."""
    tables = {f"{path}.weight" for path, child in module.named_modules() if isinstance(child, torch.nn.Embedding)}
    return tables, set(named_tensors(module)) - tables


def _part_of_experts(config: Any, batch: int) -> float:
    """Returns the fraction of experts that `batch` tokens use.

    It is 1 if the configuration has no number of experts.
    """
    num = _first(config, ("num_local_experts", "num_experts", "n_routed_experts"))
    per_token = _first(config, ("num_experts_per_tok", "num_experts_per_token", "moe_topk"))
    if not num or not per_token:
        return 1.0
    return 1 - (1 - per_token / num) ** batch


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def step_bytes(
    weight_bytes: float, layers: tuple[CacheLayer, ...], batch: int, prompt_len: int, new_tokens: int
) -> float:
    """Returns the average bytes of the decode steps after the first token."""
    lengths = range(prompt_len + 1, prompt_len + new_tokens)
    cache = sum(layer.read_bytes(length) for layer in layers for length in lengths) / len(lengths)
    return weight_bytes + batch * cache
