"""Writes programs of a bundle, each into a file that `jax.export` reads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from model_adapters.ops.cpu import ffi
from model_adapters.program.trace_context import torch_promotion, trace_lock
from torchax_serve.export.layout import GPU_CALLS
from torchax_serve.export.targets import ExportTarget
from torchax_serve.export.trees import described_tree
from torchax_serve.start.weights_file import TensorNames, assembled

_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")


@dataclasses.dataclass(frozen=True)
class ProgramWriter:
    """Writes programs of one model.

    Attributes:
        names: Names of the tensors of each weight.
        tensors: Shapes of the tensors.
        root: Folder of the bundle.
        advance: Called after each program.
    """

    names: TensorNames
    tensors: Mapping[str, jax.ShapeDtypeStruct]
    root: Path
    advance: Callable[[int], object]

    def write(
        self,
        function: Callable[..., Any],
        name: str,
        key: str,
        args: tuple[Any, ...],
        arg_names: Sequence[str],
        target: ExportTarget,
        sharding: jax.sharding.Sharding | None,
    ) -> dict[str, Any]:
        """Traces ``function(weights, *args)`` and writes it; returns its part of the manifest.

        Args:
            function: What the program computes.
            name: Name of the function.
            key: Name of the program.
            args: Arguments behind the weights, or their shapes.
            arg_names: Names of the leaves of `args`.
            target: Platform of the program.
            sharding: Where arguments are that are not divided; None: anywhere.
        """
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: _placed(leaf, sharding), args))
        tensors = {tensor: _placed(leaf, sharding) for tensor, leaf in self.tensors.items()}
        results: list[Any] = []

        def step(tensors: dict[str, jax.Array], *leaves: jax.Array) -> tuple[jax.Array, ...]:
            out = function(assembled(self.names, tensors), *jax.tree.unflatten(structure, leaves))
            results.append(described_tree(out))
            return tuple(jax.tree.leaves(out))

        step.__name__ = name
        allowed = [export.DisabledSafetyCheck.custom_call(each) for each in (*ffi.TARGETS, *GPU_CALLS)]
        with trace_lock(), torch_promotion():
            made = export.export(jax.jit(step), platforms=[target.platform], disabled_checks=allowed)(tensors, *leaves)
        path = self.root / "programs" / target.name / f"{key}.jax_export"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(made.serialize()))
        self.advance(1)
        return {
            "file": path.relative_to(self.root).as_posix(),
            "arguments": [_described(*each) for each in zip(arg_names, leaves, strict=True)],
            "results": results[-1],
            "donated": [],
            "custom_calls": sorted(set(_CUSTOM_CALL.findall(str(made.mlir_module())))),
        }


def _placed(leaf: Any, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    """Returns the shape of an argument: where it is on a mesh, else at `sharding`."""
    own = getattr(leaf, "sharding", None)
    is_divided = isinstance(own, jax.sharding.NamedSharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own if is_divided else sharding)


def _described(name: str, leaf: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(leaf.shape), "dtype": str(np.dtype(leaf.dtype))}
