"""Exports the steps of the engine's packed executor, one program for each bucket."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax import export

from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.errors import UnsupportedModelError
from model_adapters.ops.cpu import ffi
from model_adapters.program.trace_context import torch_promotion, trace_lock
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.executors.compiled_steps import StepCall
from torchax_serve.executors.packed import PackedExecutor, step_calls
from torchax_serve.executors.packed_factory import packed_shapes
from torchax_serve.export.layout import GPU_CALLS
from torchax_serve.export.programs import described_layer, program_key
from torchax_serve.export.targets import ExportTarget
from torchax_serve.export.trees import described_tree
from torchax_serve.kv_cache.memory import DEVICE_MEMORY_FRACTION, MemoryBudget, free_bytes
from torchax_serve.kv_cache.pools import PagedCache, PoolAllocator
from torchax_serve.planning.chips import CHIPS
from torchax_serve.planning.executors import AbstractPages
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.start.weights_file import TensorNames, assembled

_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")


class _PoolShapes(PoolAllocator):
    """Allocates pools as shapes without values."""

    def zeros(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> Any:
        """Returns the shape of a pool ``[num_pages, num_heads, page_size, width]``."""
        return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class StepExporter:
    """Exports the steps of a model.

    Attributes:
        runtime: The model.
        sizes: Sizes of the engine.
        names: Names of the tensors of each weight.
        tensors: Shapes of the tensors.
        folder: Folder of the programs' files, inside `root`.
        root: Folder of the bundle.
        advance: Called after each program.
    """

    runtime: ModelRuntime
    sizes: MemoryBudget
    names: TensorNames
    tensors: Mapping[str, jax.ShapeDtypeStruct]
    root: Path
    advance: Callable[[int], object]

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
            "kv_cache_memory_bytes": num_bytes,
            "buckets": dataclasses.asdict(executor.buckets),
            "programs": programs,
        }

    def _executor(self, target: ExportTarget) -> tuple[PackedExecutor, int]:
        """Returns the executor of the steps, and the bytes of its cache."""
        sizes = self.sizes
        try:
            shapes = packed_shapes(self.runtime, sizes)
        except NotPackableError as reason:
            raise not_exportable(self.runtime.program.module, reason) from reason
        sharding, num_bytes = self.runtime.program.sharding, sizes.kv_cache_memory_bytes
        if num_bytes is None:
            num_bytes = min(sizes.max_usable_bytes(shapes), self._free_bytes(target))
        executor = PackedExecutor(
            self.runtime.program,
            self.runtime.weights,
            PagedCache(sizes.plan(shapes, num_bytes), _PoolShapes() if sharding is None else AbstractPages(sharding)),
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
        taken = sum(math.prod(each.shape) * each.dtype.itemsize for each in self.tensors.values())
        return max(0, int(CHIPS[target.chip].memory_bytes * DEVICE_MEMORY_FRACTION) - taken)

    def _exported(
        self, spec: Any, call: StepCall, target: ExportTarget, sharding: jax.sharding.Sharding | None
    ) -> tuple[str, dict[str, Any]]:
        def placed(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: _placed(leaf, sharding), tree)

        leaves, structure = jax.tree.flatten(placed(call.args))
        results: list[Any] = []

        def step(tensors: dict[str, jax.Array], *leaves: jax.Array) -> tuple[jax.Array, ...]:
            weights = assembled(self.names, tensors)
            out = call.function.function(weights, *jax.tree.unflatten(structure, leaves), spec=spec)
            results.append(described_tree(out))
            return tuple(jax.tree.leaves(out))

        key = program_key(call.function.name, call.args, spec)
        step.__name__ = call.function.name
        allowed = [export.DisabledSafetyCheck.custom_call(each) for each in (*ffi.TARGETS, *GPU_CALLS)]
        with trace_lock(), torch_promotion():
            made = export.export(jax.jit(step), platforms=[target.platform], disabled_checks=allowed)(
                placed(dict(self.tensors)), *leaves
            )
        path = self.root / "programs" / target.name / f"{key}.jax_export"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(made.serialize()))
        self.advance(1)
        return key, {
            "file": path.relative_to(self.root).as_posix(),
            "arguments": [_described(name, leaf) for name, leaf in _named_leaves(call)],
            "results": results[-1],
            "donated": _donated_names(call),
            "custom_calls": sorted(set(_CUSTOM_CALL.findall(str(made.mlir_module())))),
        }


def not_exportable(module: torch.nn.Module, reason: object) -> UnsupportedModelError:
    """Returns the error of a model that a bundle cannot hold, for a reason."""
    return UnsupportedModelError(
        f"export: expected a model that writes text and that the engine runs packed, got {type(module).__name__}: "
        f"{reason}; serve the model itself"
    )


def _placed(leaf: Any, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    """Returns the shape of an argument: where it is on a mesh, else at `sharding`."""
    own = getattr(leaf, "sharding", None)
    is_divided = isinstance(own, jax.sharding.NamedSharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own if is_divided else sharding)


def _named_leaves(call: StepCall) -> Iterator[tuple[str, Any]]:
    """Yields the arguments behind the weights by name, in the order of the program."""
    for name, arg in zip(_parameters(call), call.args, strict=False):
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            yield name + jax.tree_util.keystr(path), leaf


def _donated_names(call: StepCall) -> list[str]:
    parameters = _parameters(call)
    return [parameters[number - 1] for number in call.function.donated]


def _parameters(call: StepCall) -> list[str]:
    code = call.function.function.__code__
    names = code.co_varnames[: code.co_argcount]
    return list(names[names.index("weights") + 1 :])


def _described(name: str, leaf: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(leaf.shape), "dtype": str(np.dtype(leaf.dtype))}
