"""What distinguishes programs: the model, and the arguments of a call."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from pathlib import Path
from typing import Any

import jax

from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.memory_layout import FORMATS, place_of


def model_identity(model_class: type, config_json: str, weights: Weights) -> str:
    """Names a model for the cache: two models of one identity have the same programs.

    Args:
        model_class: of the module, whose source is read.
        config_json: every attribute of its configuration.
        weights: by name; their shapes, dtypes and quantization schemes count.
    """
    digest = hashlib.sha256(f"{model_class.__module__}.{model_class.__qualname__}\n{config_json}\n".encode())
    folder = Path(inspect.getfile(model_class)).parent
    for file in sorted(folder.glob("*.py")):
        digest.update(file.read_bytes())
    for name in sorted(weights):
        parts = [f"{part.shape} {part.dtype}" for part in jax.tree.leaves(weights[name])]
        scheme = getattr(weights[name], "scheme", "")  # of a quantized weight, which decides how it is multiplied
        digest.update(f"{name} {' '.join(parts)} {scheme}\n".encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class ProgramSignature:
    """Properties that calls must share to run the same program."""

    tree: Any
    leaves: tuple[Any, ...]
    spec: Any
    precision: str | None  # of products, which callers set by a context
    names_modules: bool = False  # in its instructions, for profiles

    @classmethod
    def of(cls, args: Any, spec: Any, names_modules: bool) -> ProgramSignature:
        """Returns the signature of a call with these arguments."""
        leaves, tree = jax.tree.flatten(args)
        # Each request comes by: without layouts nothing is asked for them.
        kinds = tuple(
            (x.shape, x.dtype, getattr(x, "weak_type", False), place_of(x) if FORMATS else getattr(x, "sharding", None))
            for x in leaves
        )
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        return cls(tree, kinds, spec, precision, names_modules)

    def abstract_args(self) -> Any:
        """Returns the arguments as shapes."""
        shapes = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=is_weak)
            for shape, dtype, is_weak, sharding in self.leaves
        ]
        return jax.tree.unflatten(self.tree, shapes)
