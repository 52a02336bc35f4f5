"""Recurrent layers of a packed step: model code gets handles in place of states.

A layer asks its cache for the inputs that its convolution saw last, and for its recurrent state, and passes them to
functions of its modeling file. In a packed step it gets annotated tensors, from which nothing can be computed, and the
functions that `program/recurrent_functions.py` puts in place of those run ops on the states of all sequences.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.ops.causal_convolution import causal_convolution, causal_windows
from model_adapters.ops.segments import Segments
from model_adapters.sharding.sharded_trace import divide_channels, divide_fused_input, gather_fused_result
from sharding_rules.layout import DimLayout

_asked: contextvars.ContextVar[StateLayer | None] = contextvars.ContextVar("asked", default=None)
"""The layer whose recurrent state was asked for last. Mamba's scan of a prompt is not given its state."""


class StateLayer(LinearAttentionCacheLayerMixin):
    """A layer with states by slot, of all sequences.

    Args:
        convs: By state index, the last inputs ``[rows, K - 1, D]``; None: they are made when they are asked for.
        recurrent: The recurrent states, float32[rows, ...]; None: there are none, or they are made, too.
        segments: The tokens of the step.
        generated: Which tokens were generated, bool[T]; None: all.
        is_open: Whether states are made, of zeros.
    """

    def __init__(
        self,
        convs: Mapping[int, jax.Array],
        recurrent: jax.Array | None,
        segments: Segments,
        generated: jax.Array | None,
        *,
        is_open: bool,
    ) -> None:
        super().__init__()
        self.convs: dict[int, Any] = {index: torch_view(pool) for index, pool in convs.items()}
        self.recurrent: Any = None if recurrent is None else torch_view(recurrent)
        self.segments, self.generated, self.is_open = segments, generated, is_open
        self.num_conv_updates, self.num_recurrent_updates = 0, 0

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the states are given."""

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Returns the new inputs, annotated: the convolution reads and keeps what it needs."""
        conv_states.conv_of = self, state_idx  # type: ignore[attr-defined]
        return conv_states

    def recurrent_handle(self) -> torch.Tensor:
        """Returns a tensor in place of the recurrent state."""
        handle: torch.Tensor = torch_view(jnp.zeros((), jnp.float32))
        handle.recurrent_of = self  # type: ignore[attr-defined]
        _asked.set(self)
        return handle

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Checks that the new state is the handle that the layer's op has returned.

        Raises:
            NotPackableError: other code has made it.
        """
        # Kimi's code converts the handle to float32, which it is: the same tensor, or one without annotations.
        if state_idx or getattr(recurrent_states, "recurrent_of", self) is not self or not self.num_recurrent_updates:
            raise NotPackableError("a layer's recurrent state is not made by its op alone")
        return recurrent_states

    def run_conv(
        self, state_idx: int, x: jax.Array, width: int, op: Callable[..., tuple[jax.Array, jax.Array]]
    ) -> jax.Array:
        """Runs ``op(x[T, D], pool, segments)``, which sees `width` tokens; returns its first result."""
        pool = self.convs.get(state_idx)
        if pool is None and not self.is_open:
            raise NotPackableError(f"a layer has a convolution {state_idx} that its first trace did not have")
        own = jnp.zeros((self._num_rows, width - 1, x.shape[1]), x.dtype) if pool is None else jax_view(pool)
        out, own = op(x, own, self.segments)
        self.convs = {**self.convs, state_idx: torch_view(own)}
        self.num_conv_updates += 1
        return out

    def run_recurrence(
        self, shape: tuple[int, ...], op: Callable[[jax.Array, Segments], tuple[jax.Array, jax.Array]]
    ) -> jax.Array:
        """Runs ``op(pool, segments)`` on float32[rows, *shape]; returns its first result."""
        if self.recurrent is None and not self.is_open:
            raise NotPackableError("a layer has a recurrent state that its first trace did not have")
        own = jnp.zeros((self._num_rows, *shape), jnp.float32) if self.recurrent is None else jax_view(self.recurrent)
        if own.shape[1:] != shape:
            raise NotPackableError(f"a layer's recurrent state has the shape {shape}, and had {own.shape[1:]}")
        out, own = op(own, self.segments)
        self.recurrent = torch_view(own)
        self.num_recurrent_updates += 1
        return out

    @property
    def _num_rows(self) -> int:
        return len(self.segments.read) + 1

    def results(self) -> tuple[dict[int, jax.Array], jax.Array | None]:
        """Returns the new states: of convolutions by state index, and the recurrent one.

        Raises:
            NotPackableError: an op has not run, or more than once.
        """
        wanted = len(self.convs), int(self.recurrent is not None)
        if (self.num_conv_updates, self.num_recurrent_updates) != wanted:
            raise NotPackableError(
                f"a layer with {wanted[0]} convolutions and {wanted[1]} recurrent states runs {self.num_conv_updates} "
                f"and {self.num_recurrent_updates} of their ops"
            )
        recurrent = None if self.recurrent is None else jax_view(self.recurrent)
        return {index: jax_view(pool) for index, pool in self.convs.items()}, recurrent


def conv_of(tensor: torch.Tensor) -> tuple[StateLayer, int] | None:
    """Returns layer and state index of a convolution's inputs; None for other tensors."""
    found: tuple[StateLayer, int] | None = getattr(tensor, "conv_of", None)
    return found


def recurrent_of(tensor: Any) -> StateLayer | None:
    """Returns the layer of a handle; None for anything else."""
    found: StateLayer | None = getattr(tensor, "recurrent_of", None)
    return found


def only_sequence(tensor: torch.Tensor) -> jax.Array:
    """Returns the only sequence of a batch ``[1, ...]``."""
    array = jax_view(tensor)
    if array.shape[0] != 1:
        raise NotPackableError(f"a recurrent layer gets a batch of {array.shape[0]} of the code's own making")
    return array.reshape(array.shape[1:])


def convolved(
    inputs: torch.Tensor, weight: jax.Array, bias: jax.Array | None, layout: DimLayout | None = None
) -> torch.Tensor | None:
    """Returns the depthwise convolution of a packed layer's inputs, ``[1, D, T]``.

    None for inputs that ``update_conv_state`` of no packed step has returned. `weight` is [D, K], `bias` [D]. With a
    `layout` of the channels on a mesh, each device computes its share of each part of them, and keeps it as its state.
    """
    found = conv_of(inputs)
    if found is None:
        return None
    layer, state_idx = found
    x = only_sequence(inputs).T
    if layout is not None:
        x, weight = divide_fused_input(x, layout), divide_channels(weight.T, layout).T
        bias = None if bias is None else divide_channels(bias, layout)

    def run(x: jax.Array, pool: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
        return causal_convolution(x, weight, bias, pool, segments)

    out = layer.run_conv(state_idx, x, weight.shape[1], run)
    if layout is not None:
        out = gather_fused_result(out, layout)
    made: torch.Tensor = torch_view(out.T[None])
    return made


def windows_of(inputs: torch.Tensor, width: int) -> torch.Tensor | None:
    """Returns the last `width` inputs of each token, its own last: [1, T, width, D].

    `inputs` [1, D, T] are those that ``update_conv_state`` of a packed step has returned; None for any others. Zeros
    stand in front of a sequence.
    """
    found = conv_of(inputs)
    if found is None:
        return None
    layer, state_idx = found

    def run(x: jax.Array, pool: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
        return causal_windows(x, width, pool, segments)

    made: torch.Tensor = torch_view(layer.run_conv(state_idx, only_sequence(inputs).T, width, run)[None])
    return made


def layer_asked_last() -> StateLayer | None:
    """Returns the layer whose recurrent state this trace asked for last; None outside of one."""
    return _asked.get()


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Ends what `layer_asked_last` knows, with the trace inside of it, also one that fails."""
    token = _asked.set(None)
    try:
        yield
    finally:
        _asked.reset(token)
