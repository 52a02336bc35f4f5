"""`TrainingOptions`: what decides a training run besides model, data and adapter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from model_adapters.errors import InvalidArgumentError
from torchax_serve.validation.argument_hints import fields_refuse_unknown

MESH_AXES = ("data", "fsdp", "model")
"""Axes of a training mesh: copies of the weights; shares of the weights and of the batch; tensor parallelism."""
SCHEDULES = ("constant", "linear", "cosine")


@fields_refuse_unknown
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Sizes, optimizer and devices of a training run.

    Attributes:
        num_steps: Number of optimizer steps.
        batch_size: Rows of a step, all micro-batches together.
        seq_len: Tokens of a row.
        num_micro_batches: Parts of a batch that are computed one after the other, whose gradients are summed.
        learning_rate: Highest learning rate of AdamW.
        warmup_steps: Steps in which the learning rate rises from 0.
        schedule: How it falls after that until the last step: "constant", "linear" or "cosine".
        weight_decay: Of matrices; norms and biases have none.
        max_grad_norm: Gradients of a larger norm are scaled down to it; None: never.
        dtype: Dtype of the frozen weights and of the computation: "auto", "float32" or "bfloat16". Trained weights and
            the optimizer's states are float32 in any case.
        packing: Whether several rows of the data share a row of a batch; they do not see each other.
        answers: Which messages of the assistant are learned: "all" or the "last".
        remat: Whether activations of layers are computed again in the backward pass instead of stored.
        mesh: Number of devices on the axes ``data``, ``fsdp`` and ``model``; None: one device.
        seed: Seed of the order of the data and of new adapter weights.
        save_every: Steps between two checkpoints.
        num_checkpoints: Checkpoints that stay on disk.
    """

    num_steps: int
    batch_size: int = 8
    seq_len: int = 512
    num_micro_batches: int = 1
    learning_rate: float = 2e-4
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    dtype: str = "auto"
    packing: bool = True
    answers: Literal["all", "last"] = "all"
    remat: bool = False
    mesh: Mapping[str, int] | None = None
    seed: int = 0
    save_every: int = 100
    num_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "num_micro_batches", "save_every", "num_checkpoints"):
            _check_int(name, getattr(self, name), 1)
        _check_int("seq_len", self.seq_len, 2)
        _check_int("warmup_steps", self.warmup_steps, 0)
        _check_int("seed", self.seed, 0)
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if not (name == "max_grad_norm" and value is None) and not (_is_number(value) and value > 0):
                raise InvalidArgumentError(f"{name}: expected a number above 0, got {value!r}; give a positive number")
        if not (_is_number(self.weight_decay) and self.weight_decay >= 0):
            raise InvalidArgumentError(f"weight_decay: expected a number >= 0, got {self.weight_decay!r}; 0 is none")
        choices = {"schedule": SCHEDULES, "answers": ("all", "last"), "dtype": ("auto", "float32", "bfloat16")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgumentError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("packing", "remat"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.batch_size % self.num_micro_batches:
            raise InvalidArgumentError(
                f"num_micro_batches: expected a divisor of batch_size ({self.batch_size}), got "
                f"{self.num_micro_batches}; change one of them"
            )
        self._check_mesh()

    def _check_mesh(self) -> None:
        if self.mesh is None:
            return
        for axis, size in self.mesh.items():
            if axis not in MESH_AXES:
                raise InvalidArgumentError(
                    f"mesh: expected axes out of {', '.join(MESH_AXES)}, got {axis!r}; rename it"
                )
            _check_int(f"mesh[{axis!r}]", size, 1)
        shares = self.mesh.get("data", 1) * self.mesh.get("fsdp", 1)
        rows = self.batch_size // self.num_micro_batches
        if rows % shares:
            raise InvalidArgumentError(
                f"batch_size: expected rows of a micro-batch ({rows}) that the {shares} devices on data and fsdp "
                "divide; raise batch_size, or lower num_micro_batches"
            )

    def deciding(self) -> dict[str, Any]:
        """Returns what decides the result, as JSON values; a resumed run must have the same."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in ("save_every", "num_checkpoints")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_int(name: str, value: Any, low: int) -> None:
    if type(value) is not int or value < low:
        raise InvalidArgumentError(f"{name}: expected a whole number >= {low}, got {value!r}; correct it")
