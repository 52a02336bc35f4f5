"""Exports the steps of the engine's packed executor, one program for each bucket."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.errors import UnsupportedModelError
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.executors.packed.executor import PackedExecutor, step_calls
from torchax_serve.executors.packed.factory import layers_of, sized_cache, usable_bytes
from torchax_serve.executors.step_programs import StepCall
from torchax_serve.export.program_writer import ProgramWriter
from torchax_serve.export.programs import described_layer, described_states, program_key
from torchax_serve.export.targets import ExportTarget
from torchax_serve.kv_cache.hybrid_cache import HybridCache
from torchax_serve.kv_cache.memory import DEVICE_MEMORY_FRACTION, MemoryBudget, free_bytes
from torchax_serve.kv_cache.pools import PagedCache, PoolAllocator
from torchax_serve.planning.chips import CHIPS
from torchax_serve.planning.executors import AbstractPages
from torchax_serve.runtime.model_runtime import ModelRuntime


class _PoolShapes(PoolAllocator):
    """Allocates pools and states as shapes without values."""

    def zeros(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> Any:
        """Returns the shape of a pool ``[num_pages, num_heads, page_size, width]``."""
        return jax.ShapeDtypeStruct(shape, dtype)

    def slot_states(self, shape: tuple[int, ...], dtype: np.dtype, *, is_of_heads: bool = False) -> Any:
        """Returns the shape of a state of each slot and snapshot."""
        return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class StepExporter:
    """Exports the steps of a model.

    Attributes:
        runtime: The model.
        sizes: Sizes of the engine.
        programs: Writes the programs.
    """

    runtime: ModelRuntime
    sizes: MemoryBudget
    programs: ProgramWriter

    def export(self, target: ExportTarget) -> dict[str, Any]:
        """Writes the programs for a platform; returns their part of the manifest.

        Raises:
            UnsupportedModelError: the engine does not run the model packed.
        """
        of_mesh = self.runtime.program.sharding
        with target.tracing(None if of_mesh is None else of_mesh.replicated()) as sharding:
            executor, num_bytes = self._executor(target)
            calls = list(step_calls(executor))
            programs = dict(self._exported(spec, call, target, sharding) for spec, call in calls)
        return {
            "platform": target.platform,
            "chip": target.chip,
            "uses_kernels": target.uses_kernels,
            "layers": [described_layer(layer) for layer in executor.cache.plan.shapes],
            "states": described_states(executor.cache, self.sizes),
            "kv_cache_memory_bytes": num_bytes,
            "buckets": dataclasses.asdict(executor.buckets),
            "programs": programs,
        }

    def _executor(self, target: ExportTarget) -> tuple[PackedExecutor, int]:
        """Returns the executor of the steps, and the bytes of its cache."""
        sizes = self.sizes
        try:
            shapes, recurrent = layers_of(self.runtime, sizes)
        except NotPackableError as reason:
            raise not_exportable(self.runtime.program.module, reason) from reason
        sharding, num_bytes = self.runtime.program.sharding, sizes.kv_cache_memory_bytes
        if num_bytes is None:
            num_bytes = min(usable_bytes(sizes, shapes, recurrent), self._free_bytes(target))
        plan, num_snapshots = sized_cache(sizes, shapes, recurrent, num_bytes)
        pages = _PoolShapes() if sharding is None else AbstractPages(sharding)
        cache = PagedCache(plan, pages)
        if recurrent is not None:
            cache = HybridCache(plan, recurrent, sizes.max_num_seqs, num_snapshots, pages)
        executor = PackedExecutor(
            self.runtime.program,
            self.runtime.weights,
            cache,
            ExecutableCache(),
            num_slots=sizes.max_num_seqs,
            token_budget=sizes.max_num_batched_tokens,
            max_num_steps=sizes.max_num_steps,
            batch_invariant=sizes.batch_invariant,
        )
        return executor, num_bytes

    def _free_bytes(self, target: ExportTarget) -> int:
        if target.chip is None:
            return free_bytes()
        taken = sum(math.prod(each.shape) * each.dtype.itemsize for each in self.programs.tensors.values())
        return max(0, int(CHIPS[target.chip].memory_bytes * DEVICE_MEMORY_FRACTION) - taken)

    def _exported(
        self, spec: Any, call: StepCall, target: ExportTarget, sharding: jax.sharding.Sharding | None
    ) -> tuple[str, dict[str, Any]]:
        function = functools.partial(call.function.function, spec=spec)
        key = program_key(call.function.name, call.args, spec)
        entry = self.programs.write(
            function, call.function.name, key, call.args, [name for name, _ in _named_leaves(call)], target, sharding
        )
        return key, {**entry, "donated": _donated_names(call)}


def not_exportable(module: torch.nn.Module, reason: Exception) -> UnsupportedModelError:
    """Returns the error of a model that a bundle cannot hold, for a reason."""
    return UnsupportedModelError(
        f"export: expected a model that writes text and that the engine runs packed, got {type(module).__name__}: "
        f"{reason}; serve the model itself"
    )


def _named_leaves(call: StepCall) -> Iterator[tuple[str, Any]]:
    """Yields the arguments behind the weights by name, in the order of the program."""
    for name, arg in zip(_parameters(call), call.args, strict=False):
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            yield name + jax.tree_util.keystr(path), leaf


def _donated_names(call: StepCall) -> list[str]:
    parameters = _parameters(call)
    return [parameters[number - 1] for number in call.function.donated]


def _parameters(call: StepCall) -> list[str]:
    names = list(inspect.signature(call.function.function).parameters)
    return names[names.index("weights") + 1 :]
