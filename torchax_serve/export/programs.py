"""Reads the programs of a bundle: what tracing the model would give, without the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import export

from model_adapters.caches.packed_batch import LayerPools
from model_adapters.errors import CheckpointError, TorchaxServeError
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.executors.packed.probes import RECURRENT
from torchax_serve.executors.packed.specs import StepBuckets
from torchax_serve.export.manifest import Manifest
from torchax_serve.export.trees import restored_tree
from torchax_serve.kv_cache.cache_layout import SlotStateSpec
from torchax_serve.kv_cache.hybrid_cache import HybridCache, RecurrentLayers
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.kv_cache.pools import PagedCache, PagedLayerSpec
from torchax_serve.start.weights_file import TensorNames


def program_key(name: str, args: tuple[Any, ...], spec: Any) -> str:
    """Returns the name that a step's program has when it is exported and when it is called.

    Args:
        name: Name of the step's function.
        args: Its arguments behind the weights, or their shapes.
        spec: Its static argument.
    """
    kinds = [(tuple(leaf.shape), str(np.dtype(leaf.dtype))) for leaf in jax.tree.leaves(args)]
    return f"{name}-{hashlib.sha256(f'{kinds} {spec!r}'.encode()).hexdigest()[:16]}"


class ExportedPrograms:
    """The programs of a bundle for one platform; an `ExportedFunctions`.

    Args:
        manifest: The manifest of the bundle.
        variant: The part of it about the programs for the platform.
        names: Names of the tensors of each weight.
    """

    def __init__(self, manifest: Manifest, variant: Mapping[str, Any], names: TensorNames) -> None:
        self._manifest, self._variant, self._names = manifest, variant, names

    @property
    def identity(self) -> str:
        """Digest of what compiled programs depend on.

        Versions that differ in weights alone have the same.
        """
        code = {entry["file"] for entry in self._variant["programs"].values()}
        files = {
            name: each["sha256"]
            for name, each in self._manifest["files"].items()
            if name in code or name.startswith("native/")
        }
        described = [self._variant, files, self._manifest["weights"]["names"]]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def memoized(self, name: str) -> Any:
        """Returns what tracing the model has shown.

        Raises:
            TorchaxServeError: it was not needed when the bundle was made.
        """
        layers, states = tuple(map(_layer, self._variant["layers"])), self._variant.get("states")
        if name == "packed shapes":
            return layers if states is None else RECURRENT
        if name == "recurrent layers" and states is not None:
            return layers, _recurrent(states)
        if name == "step buckets":
            return StepBuckets(**{key: tuple(sizes) for key, sizes in self._variant["buckets"].items()})
        raise TorchaxServeError(f"expected an engine with the options of its bundle, got one that needs its {name}")

    def function(self, name: str, args: tuple[Any, ...], spec: Any) -> Callable[..., Any]:
        """Returns ``f(weights, *args)`` of a step.

        Raises:
            TorchaxServeError: the bundle has no program for such a step.
            CheckpointError: this release of JAX does not read the program.
        """
        entry = self._variant["programs"].get(program_key(name, args, spec))
        if entry is None:
            raise TorchaxServeError(
                f"{self._manifest.folder}: expected a step that was exported, got {name} with {spec}; export the "
                "bundle again with this release of torchax-serve"
            )
        exported = read_program(self._manifest, entry["file"])

        def run(weights: Weights, *args: Any) -> Any:
            leaves = exported.call(self._tensors_of(weights), *jax.tree.leaves(args))
            return restored_tree(entry["results"], leaves)

        return run

    def _tensors_of(self, weights: Weights) -> dict[str, jax.Array]:
        tensors: dict[str, jax.Array] = {}
        for name, tree in self._names.items():
            tensors.update(zip(jax.tree.leaves(tree), jax.tree.leaves(weights[name]), strict=True))
        return tensors


def read_program(manifest: Manifest, name: str) -> export.Exported:
    """Returns an exported program of a bundle.

    Raises:
        CheckpointError: the file is damaged, or this release of JAX does not read it.
    """
    content = manifest.read_bytes(name)
    try:
        return export.deserialize(bytearray(content))
    except Exception as error:  # whatever JAX's readers raise for formats that they no longer read
        made_with = manifest["made_with"]["jax"]
        raise CheckpointError(
            f"{manifest.folder / name}: expected a program for jax {jax.__version__}, got one of jax {made_with} "
            f"({str(error).splitlines()[0]}); run torchax-serve bundle refresh with jax {made_with}, or export again"
        ) from error


def described_layer(layer: PagedLayerSpec) -> dict[str, Any]:
    """Returns the paged cache of a layer as JSON."""
    return {**vars(layer), "dtype": str(layer.dtype)}


def described_states(cache: PagedCache, sizes: MemoryBudget) -> dict[str, Any] | None:
    """Returns what layers keep besides pages as JSON; None for a cache of pages alone."""
    if not isinstance(cache, HybridCache):
        return None
    return {
        "enable_prefix_caching": sizes.enable_prefix_caching,  # without it there are no snapshots
        "layers": [dict(vars(layer)) for layer in cache.recurrent.layers],
        "of_request": [
            {"shape": state.shape, "dtype": str(state.dtype), "is_of_heads": state.is_of_heads}
            for state in cache.recurrent.states
        ],
    }


def _recurrent(description: Mapping[str, Any]) -> RecurrentLayers:
    layers = [LayerPools(**{**each, "convs": tuple(map(tuple, each["convs"]))}) for each in description["layers"]]
    states = [
        SlotStateSpec(tuple(each["shape"]), np.dtype(jax.numpy.dtype(each["dtype"])), is_of_heads=each["is_of_heads"])
        for each in description["of_request"]
    ]
    return RecurrentLayers(tuple(layers), tuple(states))


def _layer(description: Mapping[str, Any]) -> PagedLayerSpec:
    return PagedLayerSpec(**{**description, "dtype": np.dtype(jax.numpy.dtype(description["dtype"]))})
