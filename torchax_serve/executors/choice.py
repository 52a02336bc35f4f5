"""Chooses the executor of a model: packed if its code allows it, else per-sequence."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.linear import not_invariant_reason
from model_adapters.ops.quantized_weight import QuantizedWeight
from torchax_serve.executors.base import ExecutorChoice
from torchax_serve.executors.packed.factory import packed_executor
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.scheduler.speculative_config import refuse_heads

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime


def choose_executor(runtime: ModelRuntime, sizes: MemoryBudget) -> ExecutorChoice:
    """Returns the first executor that supports the model, with its cache.

    Raises:
        UnsupportedModelError: requests of this model cannot be batched; with the reasons.
        InvalidArgumentError: `sizes` has an option that the executor does not support.
        OutOfMemoryError: the cache does not fit.
    """
    if runtime.steps.executables.launcher is not None:
        refuse_heads(sizes.speculative, "a model on several hosts")
    try:
        choice = packed_executor(runtime, sizes)
    except NotPackableError as reason:
        _check_invariance(sizes, str(reason))
        from torchax_serve.executors.per_sequence.factory import per_sequence_executor  # needs torch

        choice = per_sequence_executor(runtime.with_module(), sizes, str(reason))
    _check_invariance(sizes, not_invariant_reason() or _quantized_without_kernel(runtime))
    return dataclasses.replace(choice, sampler_table_bytes=sizes.sampler_table_bytes)


def _quantized_without_kernel(runtime: ModelRuntime) -> str | None:
    """Returns a quantized weight whose XLA product depends on the number of rows, or None."""
    for name, weight in runtime.weights.items():
        if isinstance(weight, QuantizedWeight) and weight.scheme.layout != "cpu":
            return f"no C++ kernel multiplies with the quantized weight {name} ({weight.scheme.source})"
    return None


def _check_invariance(sizes: MemoryBudget, reason: str | None) -> None:
    if sizes.batch_invariant and reason is not None:
        raise InvalidArgumentError(
            f"batch_invariant: expected a model that runs packed, with the C++ CPU kernels; got: {reason}. Leave it "
            "out, or serve float32"
        )
