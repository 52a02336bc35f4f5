"""Forwards of inputs of any kind: those of equal shapes are the rows of one batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import torch

from model_adapters.errors import InvalidArgumentError
from torchax_serve.pooling.queue import check_wanted
from torchax_serve.runtime.eager import FailsInTorchError

MAX_ROWS = 32
"""Rows of a batch; a power of two."""
MAX_VALUES = 32 * 3 * 224 * 224
"""Input values of a batch: larger ones are not faster, and activations take many times their memory."""

Inputs = Mapping[str, Any]
"""Arguments of a forward of one input: tensors with a first dimension of 1, and other values."""


def run_batches(
    inputs: Sequence[Inputs], forward: Callable[[dict[str, Any]], Any], *, max_rows: int = MAX_ROWS
) -> list[Any]:
    """Returns the outputs of a forward for each of `inputs`, in their order.

    Inputs of equal shapes are batched. The number of rows is a power of two, so that each shape has few programs;
    further rows are copies of the last, and their outputs are left out.

    Args:
        inputs: Of the model.
        forward: Called with the arguments of a batch; values that are no tensors are lists with one for each row.
        max_rows: Most rows of a batch, a power of two.
    """
    found: list[Any] = [None] * len(inputs)
    by_shape: dict[Hashable, list[int]] = {}
    for index, each in enumerate(inputs):
        by_shape.setdefault(_shapes(each), []).append(index)
    for indices in by_shape.values():
        most = min(max_rows, _most_rows(inputs[indices[0]]))
        while indices:
            taken, indices = indices[:most], indices[most:]
            num_rows = 1 << (len(taken) - 1).bit_length()
            check_wanted()
            if num_rows == 1:
                found[taken[0]] = _row(_computed(forward, dict(inputs[taken[0]])), None, 1)
                continue
            rows = [inputs[index] for index in (*taken, *[taken[-1]] * (num_rows - len(taken)))]
            output = _computed(forward, {name: _joined([row[name] for row in rows]) for name in rows[0]})
            for number, index in enumerate(taken):
                found[index] = _row(output, number, num_rows)
    return found


def _computed(forward: Callable[[dict[str, Any]], Any], batch: dict[str, Any]) -> Any:
    """Returns the outputs of a forward.

    Raises:
        InvalidArgumentError: PyTorch or the device fails on inputs of these shapes.
    """
    try:
        return forward(batch)
    except FailsInTorchError as error:
        cause = str(error.__cause__).strip().partition("\n")[0]
        raise InvalidArgumentError(
            f"input: expected one that the model computes, got {_described(batch)}, on which PyTorch fails, too "
            f"({cause[:160]}); give another size or length"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise InvalidArgumentError(
            f"input: expected one that the device computes, got {_described(batch)}, on which it fails "
            f"({str(error).strip().partition(chr(10))[0][:160]}); give a smaller one"
        ) from error


def _described(batch: Inputs) -> str:
    shapes = {name: list(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _shapes(inputs: Inputs) -> Hashable:
    return tuple(
        (name, (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None)
        for name, value in sorted(inputs.items())
    )


def _most_rows(inputs: Inputs) -> int:
    """Returns the most rows of a batch, a power of two."""
    num_values = max((each.numel() for each in inputs.values() if isinstance(each, torch.Tensor)), default=1)
    fitting = max(1, min(MAX_ROWS, MAX_VALUES // max(1, num_values)))
    return 1 << (fitting.bit_length() - 1)


def _joined(values: list[Any]) -> Any:
    return torch.cat(values) if isinstance(values[0], torch.Tensor) else values


def _row(output: Any, number: int | None, num_rows: int) -> Any:
    """Returns a row of a batch's output, floats as float32; None: there is one row only."""
    if isinstance(output, torch.Tensor):
        values = output.float() if output.is_floating_point() else output
        is_batch = number is not None and values.ndim > 0 and values.shape[0] == num_rows
        return values[number : number + 1] if is_batch and number is not None else values
    if isinstance(output, Mapping):
        made: Any = type(output)
        return made({name: _row(value, number, num_rows) for name, value in output.items() if value is not None})
    if isinstance(output, list | tuple):
        if number is None or any(isinstance(each, torch.Tensor | Mapping) for each in output):
            return type(output)(_row(each, number, num_rows) for each in output)
        return output[number] if len(output) == num_rows else output
    return output
