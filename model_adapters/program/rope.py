"""Rotary embeddings with frequencies that depend on the length of the sequence.

These are LongRoPE and dynamic NTK scaling.

transformers writes the frequencies of the length at hand into the module before it rotates (`dynamic_rope_update`), so
what a call computes depends on the calls before it. While a model is traced, the frequencies are a function of the
length instead, which is a traced number: that of all rows together, as transformers counts it, or one for each token
where a forward has tokens of several sequences, or of a prompt cut into chunks.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import modeling_rope_utils

from model_adapters.bridge.views import as_views, jax_view, torch_view
from model_adapters.program.rope_lengths import RopeLengths
from model_adapters.program.trace_context import replaced_methods

LONGROPE, DYNAMIC = "longrope", "dynamic"
_TOLD: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("rope_lengths", default=None)


@contextlib.contextmanager
def lengths_told(lengths: jax.Array | None) -> Iterator[None]:
    """Sets the lengths for the frequencies inside the context.

    `lengths` is int32[], or int32[T] with one per token; None means the lengths of the positions.
    """
    token = _TOLD.set(lengths)
    try:
        yield
    finally:
        _TOLD.reset(token)


def lengths_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns the lengths for the frequencies of `position_ids` [..., T].

    The lengths are int32[], or int32[T] with one per token.
    """
    told = _TOLD.get()
    lengths = jnp.max(jax_view(as_views(position_ids))) + 1 if told is None else told
    result: torch.Tensor = torch_view(lengths)
    return result


@dataclasses.dataclass(frozen=True)
class _Frequencies:
    """Frequencies of one rotary module, or of one type of its layers.

    Attributes:
        kind: as in transformers' table of rope types.
        border: the longest length with the module's own frequencies.
        long: float32[dim / 2] for longer ones; None where each length has its own.
    """

    kind: str
    border: int
    long: np.ndarray | None

    @classmethod
    def of(cls, rotary: Any, layer_type: str | None) -> _Frequencies | None:
        """Returns the frequencies of `rotary`; None if they are the same for all lengths."""
        kind = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
        if DYNAMIC in kind:  # the same test as in transformers
            return cls(kind, int(rotary.original_max_seq_len), None)
        if kind != LONGROPE:
            return None
        parameters = rotary.config.rope_parameters
        border = int((parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"])
        long = _initial(kind, rotary.config, torch.device("cpu"), border + 1, layer_type)
        return cls(kind, border, long.numpy())

    def at(self, rotary: Any, length: jax.Array, layer_type: str | None, device: Any) -> jax.Array:
        """Returns float32[dim / 2] for a sequence of `length` int32[] tokens."""
        short = jax_view(as_views(getattr(rotary, f"{_prefix(layer_type)}original_inv_freq")))
        if self.long is not None:
            long = jnp.asarray(self.long)
        else:
            long = jax_view(as_views(_initial(self.kind, rotary.config, device, torch_view(length), layer_type)))
        return jnp.where(length > self.border, long, short)


def _initial(kind: str, config: Any, device: Any, length: Any, layer_type: str | None) -> torch.Tensor:
    """Frequencies by transformers' own formula."""
    frequencies, _ = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](
        config, device, seq_len=length, layer_type=layer_type
    )
    return frequencies


def _prefix(layer_type: str | None) -> str:
    return "" if layer_type is None else f"{layer_type}_"


class LengthDependentRope:
    """The rotary modules of a model whose frequencies depend on the length of the sequence.

    Attributes:
        lengths: for which lengths they are the same.
    """

    def __init__(self, module: torch.nn.Module, found: dict[tuple[Any, str | None], _Frequencies]) -> None:
        self._found = found
        borders = {frequencies.border for frequencies in found.values()}
        has_one_long = len(borders) == 1 and all(x.long is not None for x in found.values())
        self.lengths = RopeLengths(min(borders), has_one_long, _recompute_len(module))

    @classmethod
    def of(cls, module: torch.nn.Module) -> LengthDependentRope | None:
        """Returns the length-dependent rotary modules of `module`; None if it has none."""
        found = {}
        for child in module.modules():
            if _undecorated(type(child)) is None:
                continue
            kinds = child.rope_type
            for layer_type in kinds if isinstance(kinds, dict) else (None,):
                if (frequencies := _Frequencies.of(child, layer_type)) is not None:
                    found[child, layer_type] = frequencies
        return cls(module, found) if found else None

    def intercepted(self) -> contextlib.AbstractContextManager[None]:
        """Rotates by the frequencies of `lengths_told`, or of the positions, inside the context.

        No state stays on the modules.
        """
        modules = {id(child): child for child, _ in self._found}
        return replaced_methods(
            (child, "forward", self._forward) for child in modules.values() if "forward" not in vars(child)
        )

    @property
    def _forward(self) -> Callable[..., Any]:
        def forward(rotary: Any, x: Any, position_ids: Any, layer_type: str | None = None) -> Any:
            return self._rotate(rotary, x, position_ids, layer_type)

        return forward

    def _rotate(self, rotary: Any, x: Any, position_ids: Any, layer_type: str | None) -> Any:
        own = _undecorated(type(rotary))
        assert own is not None
        given = {} if layer_type is None else {"layer_type": layer_type}
        frequencies = self._found.get((rotary, layer_type))
        if frequencies is None:  # a layer type with other frequencies
            return own(rotary, x, position_ids, **given)

        def at(length: jax.Array, positions: jax.Array) -> Any:
            with _in_place(rotary, layer_type, frequencies.at(rotary, length, layer_type, x.device)):
                return jax_view(own(rotary, x, torch_view(positions), **given))

        lengths, positions = jax_view(lengths_of(position_ids)), jax_view(as_views(position_ids))
        return torch_view(at(lengths, positions) if lengths.ndim == 0 else _by_token(at, lengths, positions))


def _by_token(at: Callable[[jax.Array, jax.Array], Any], lengths: jax.Array, positions: jax.Array) -> Any:
    """Returns the results of `at` for `positions` [..., T], each with its length in int32[T]."""
    one = jax.eval_shape(at, lengths[0], positions[..., :1])
    if lengths.shape[0] == 1:
        return at(lengths[0], positions)
    all_tokens = jax.eval_shape(at, lengths[0], positions)
    axes = jax.tree.map(
        lambda x, y: next(i for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b), one, all_tokens
    )

    def of_one(length: jax.Array, position: jax.Array) -> Any:
        return jax.tree.map(jnp.squeeze, at(length, position[..., None]), axes)

    return jax.vmap(of_one, in_axes=(0, -1), out_axes=axes)(lengths, positions)


@contextlib.contextmanager
def _in_place(rotary: Any, layer_type: str | None, frequencies: jax.Array) -> Iterator[None]:
    """Replaces the module's own frequencies by `frequencies` float32[dim / 2]."""
    name = f"{_prefix(layer_type)}inv_freq"
    before = getattr(rotary, name)
    setattr(rotary, name, torch_view(frequencies))
    try:
        yield
    finally:
        setattr(rotary, name, before)


def _undecorated(kind: type) -> Callable[..., Any] | None:
    """Returns the forward of a rotary class without transformers' `dynamic_rope_update`.

    None for a class that does not use the decorator.
    """
    function = getattr(kind, "forward", None)
    while function is not None:
        inner = getattr(function, "__wrapped__", None)
        is_update = getattr(function, "__globals__", {}).get("__name__") == modeling_rope_utils.__name__
        if inner is not None and is_update:
            return inner
        function = inner
    return None


def _recompute_len(module: torch.nn.Module) -> int | None:
    """Returns the length after which the model itself drops the cache, as Phi-3 does.

    Its own preparation of a step does so. None for other models.
    """
    prepare = getattr(type(module), "prepare_inputs_for_generation", None)
    code = getattr(inspect.unwrap(prepare), "__code__", None) if prepare is not None else None
    name = "original_max_position_embeddings"
    length = getattr(getattr(module, "config", None), name, None)
    return int(length) if code is not None and name in code.co_names and length is not None else None
