"""Lowerings of PyTorch's LSTM, GRU and RNN, of packed sequences too.

A step is traced once and scanned over time; PyTorch's own decomposition has a copy of it for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import as_views, jax_view, set_lowering, set_raw_lowering, torch_view
from model_adapters.errors import UnsupportedModelError

UNROLL = 4
"""Steps of a scan that are one iteration: a loop of XLA costs microseconds each."""

State = tuple[jax.Array, ...]
Cell = Callable[[State, jax.Array, Sequence[jax.Array]], State]


def install() -> None:
    """Registers the lowerings in torchax's table."""
    set_lowering(torch.lstm, functools.partial(_recurrent, _lstm_cell))
    set_lowering(torch.gru, functools.partial(_recurrent, _gru_cell))
    set_lowering(torch.rnn_tanh, functools.partial(_recurrent, _rnn_cell(jnp.tanh)))
    set_lowering(torch.rnn_relu, functools.partial(_recurrent, _rnn_cell(jax.nn.relu)))
    for function, lowered in ((torch._pack_padded_sequence, _pack), (torch._pad_packed_sequence, _unpack)):
        set_lowering(function, lowered)  # torchax has none
        set_raw_lowering(function, lowered)


def _lstm_cell(state: State, given: jax.Array, weights: Sequence[jax.Array]) -> State:
    """Returns hidden [b, h] and cell state of a step; `given` is what the input adds."""
    hidden, cell = state
    gates = given + _linear(hidden, weights[0], weights[1:])
    enter, keep, new, leave = jnp.split(gates, 4, -1)
    cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
    return jax.nn.sigmoid(leave) * jnp.tanh(cell), cell


def _gru_cell(state: State, given: jax.Array, weights: Sequence[jax.Array]) -> State:
    """Returns the hidden state [b, h] of a step."""
    (hidden,) = state
    parts = jnp.split(given, 3, -1), jnp.split(_linear(hidden, weights[0], weights[1:]), 3, -1)
    reset, keep = (jax.nn.sigmoid(a + b) for a, b in zip(parts[0][:2], parts[1][:2], strict=True))
    new = jnp.tanh(parts[0][2] + reset * parts[1][2])
    return (new + keep * (hidden - new),)


def _rnn_cell(activation: Callable[[jax.Array], jax.Array]) -> Cell:
    def cell(state: State, given: jax.Array, weights: Sequence[jax.Array]) -> State:
        return (activation(given + _linear(state[0], weights[0], weights[1:])),)

    return cell


def _linear(x: jax.Array, weight: jax.Array, bias: Sequence[jax.Array]) -> jax.Array:
    return sum(bias, x @ weight.T)


def _recurrent(cell: Cell, x: jax.Array, *args: Any) -> tuple[jax.Array, ...]:
    """Computes ``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``.

    Arguments are those of PyTorch: of a sequence [time, batch, size], or [batch, time, size] with ``batch_first``; or
    of a packed one, whose second is its batch sizes.
    """
    is_packed = isinstance(args[2], list | tuple)
    sizes = _known(args[0]) if is_packed else None
    start, params, has_biases, num_layers, dropout, train, both_ways, *rest = args[1:] if is_packed else args
    if dropout and train:
        raise UnsupportedModelError(
            f"expected a recurrent layer without dropout, got {dropout} in training; call eval() before"
        )
    start = tuple(start) if isinstance(start, list | tuple) else (start,)
    is_turned = bool(rest and rest[0])
    mask = None
    if sizes is not None:
        places, is_inside = _places(sizes)
        x, mask = x[places], jnp.asarray(is_inside)[..., None]
    elif is_turned:
        x = jnp.swapaxes(x, 0, 1)
    num_ways = 2 if both_ways else 1
    each = len(params) // (num_layers * num_ways)
    last: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for way in range(num_ways):
            number = layer * num_ways + way
            own = params[number * each : (number + 1) * each]
            state, output = _scanned(
                cell, x, mask, tuple(part[number] for part in start), own, has_biases=has_biases, reverse=way == 1
            )
            last.append(state)
            outputs.append(output)
        x = jnp.concatenate(outputs, -1) if both_ways else outputs[0]
    if sizes is not None:
        x = x[np.nonzero(is_inside)]
    elif is_turned:
        x = jnp.swapaxes(x, 0, 1)
    return (x, *(jnp.stack(part) for part in zip(*last, strict=True)))


def _scanned(
    cell: Cell,
    x: jax.Array,
    mask: jax.Array | None,
    start: State,
    params: Sequence[jax.Array],
    *,
    has_biases: bool,
    reverse: bool,
) -> tuple[State, jax.Array]:
    """Returns the last state and the outputs [time, batch, size] of one layer in one direction.

    Args:
        cell: A step.
        x: Inputs, [time, batch, size].
        mask: Whether a step counts, bool[time, batch, 1]; None: all do.
        start: The first state.
        params: Weights of the input and of the state, biases of both, and the projection, as far as there are.
        has_biases: Whether there are biases.
        reverse: From the end to the beginning.
    """
    num_weights = 4 if has_biases else 2
    projection = params[num_weights] if len(params) > num_weights else None
    biases = params[2:4] if has_biases else ()
    given = _linear(x, params[0], biases[:1])
    weights = (params[1], *biases[1:])

    def step(state: State, inputs: tuple[jax.Array, Any]) -> tuple[State, jax.Array]:
        found = cell(state, inputs[0], weights)
        if projection is not None:
            found = (found[0] @ projection.T, *found[1:])
        if mask is not None:
            found = tuple(jnp.where(inputs[1], new, old) for new, old in zip(found, state, strict=True))
        return found, found[0]

    return jax.lax.scan(step, start, (given, mask), reverse=reverse, unroll=min(UNROLL, max(1, x.shape[0])))


def _known(values: Any) -> np.ndarray:
    """Returns integers of the host; raises an error of JAX if they are not known in a trace."""
    return np.asarray(jax_view(as_views(values)))


def _places(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row of a packed sequence for each [time, batch], and whether there is one."""
    is_inside = np.arange(sizes[0]) < sizes[:, None]
    starts = np.cumsum(sizes) - sizes
    return np.where(is_inside, starts[:, None] + np.arange(sizes[0]), 0), is_inside


def _pack(x: Any, lengths: Any, batch_first: bool) -> tuple[Any, torch.Tensor]:
    """Computes ``torch._pack_padded_sequence``, whose sizes stay on the host."""
    array, lens = jax_view(as_views(x)), _known(lengths)
    if (lens[:-1] < lens[1:]).any() or lens.min() < 1:
        raise RuntimeError(f"expected lengths from 1 in falling order, got {lens.tolist()}; pass enforce_sorted=False")
    array = jnp.swapaxes(array, 0, 1) if batch_first else array
    is_inside = np.arange(lens[0])[:, None] < lens
    return torch_view(array[np.nonzero(is_inside)]), torch.as_tensor(is_inside.sum(1))


def _unpack(
    data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Any, torch.Tensor]:
    """Computes ``torch._pad_packed_sequence``, whose lengths stay on the host."""
    array, sizes = jax_view(as_views(data)), _known(batch_sizes)
    places, is_inside = _places(sizes)
    found = jnp.where(is_inside.reshape(*is_inside.shape, *(1,) * (array.ndim - 1)), array[places], padding_value)
    missing = max(0, total_length - len(sizes))
    found = jnp.pad(found, [(0, missing), *[(0, 0)] * (found.ndim - 1)], constant_values=padding_value)
    found = jnp.swapaxes(found, 0, 1) if batch_first else found
    return torch_view(found.astype(array.dtype)), torch.as_tensor(is_inside.sum(0))
