"""Weights, optimizer and batches on a mesh: tensor parallelism by rules, else FSDP.

Nothing of the model is rewritten: XLA divides one program as its arguments are divided (GSPMD, Xu et al. 2021), so that
a layout changes where numbers lie and not what they are. ZeRO's third stage (Rajbhandari et al., 2020) is the axis
``fsdp``: each device has a share of every weight, gradient and optimizer state, and of the batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
from model_adapters.sharding.model_sharding import ModelSharding
from sharding_rules import TensorPlacement
from torchax_serve.distributed.mesh import mesh_of
from torchax_serve.training.options import MESH_AXES

MIN_SHARED_SIZE = 1024
"""Least number of elements of a weight that FSDP divides; smaller ones cost more to gather than they save."""


class Layout:
    """Shardings of a training run.

    Args:
        base: The model of transformers, before an adapter wraps it.
        shape: Number of devices by axis of `MESH_AXES`.

    Raises:
        InvalidArgumentError: more devices than there are.
    """

    def __init__(self, base: PreTrainedModel, shape: Mapping[str, int]) -> None:
        sizes = [shape.get(axis, 1) for axis in MESH_AXES]
        number, devices = math.prod(sizes), jax.devices()
        if number > len(devices):
            written = " x ".join(f"{axis} {size}" for axis, size in shape.items())
            raise InvalidArgumentError(
                f"mesh: expected at most the {len(devices)} devices there are, got {written} = {number}; lower an axis"
            )
        self.mesh = Mesh(np.array(devices[:number], dtype=object).reshape(sizes), MESH_AXES)
        self._rules: dict[str, PartitionSpec] = {}
        if sizes[2] > 1:
            placed = ModelSharding.of(base, mesh_of(devices[: sizes[2]], {"model": sizes[2]})).placed
            # Rows that serving repeats or pads lie here as the model has them, on every device; of recurrent layers,
            # which serving divides by part, each device has an even piece where there is one.
            self._rules = {name: each.spec for name, each in placed.items() if _is_even(each, sizes[2])}

    def of_weight(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of a weight, its gradient and its optimizer states.

        Args:
            name: Name in the module that is trained, also with the parts that peft adds.
            shape: Its shape.
        """
        own = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        axes: list[Any] = [*self._rules.get(own, ()), *(None for _ in shape)][: len(shape)]
        share = self.mesh.shape["fsdp"]
        if share > 1 and math.prod(shape) >= MIN_SHARED_SIZE:
            free = [i for i, size in enumerate(shape) if axes[i] is None and size % share == 0]
            if free:
                axes[max(free, key=lambda i: shape[i])] = "fsdp"
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def of_batch(self) -> NamedSharding:
        """Returns the sharding of batches, [num_micro_batches, num_rows, row_len]."""
        return NamedSharding(self.mesh, PartitionSpec(None, ("data", "fsdp")))

    def replicated(self) -> NamedSharding:
        """Returns the sharding of numbers that every device has."""
        return NamedSharding(self.mesh, PartitionSpec())


@contextlib.contextmanager
def partitionable() -> Iterator[None]:
    """Traces ops as references inside.

    XLA cannot divide a kernel, and would gather its arguments.
    """
    with contextlib.ExitStack() as stack:
        for op in registry.list_ops():
            stack.enter_context(registry.use(op.name, "reference"))
        yield


def _is_even(placed: TensorPlacement, num_shards: int) -> bool:
    """Returns whether a tensor as the model has it can be divided where serving divides it."""
    if placed.rule.parts is None:
        return placed.is_unchanged
    return all(size % num_shards == 0 for size, dim in zip(placed.shape, placed.dims, strict=True) if dim.mesh_axis)
