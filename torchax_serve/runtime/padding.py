"""Which tokens of a batch are real: none padded, padded on the left, or any other 2D mask."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.bridge.views import to_jax_array
from model_adapters.caches.device_cache import AttentionLayer, DeviceCache
from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError
from model_adapters.program.model_program import ModelProgram
from model_adapters.program.padding_safety import has_further_logits, may_have_further_logits
from torchax_serve.runtime.static_args import NEEDS_VALUES


@dataclasses.dataclass(frozen=True)
class Padding:
    """A batch's padding; neither field set means there is none.

    Attributes:
        starts: int64[batch], the first real token of each row, where all padding is on the left.
        mask: bool[batch, len], where padding is anything else.
    """

    starts: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @classmethod
    def of(cls, mask: torch.Tensor | None, length: int) -> Padding:
        """Returns the padding that an attention mask [batch, length] describes.

        Raises:
            InvalidArgumentError: the mask has another shape.
        """
        if mask is None:
            return cls()
        if mask.ndim != 2 or mask.shape[1] != length:
            raise InvalidArgumentError(
                f"expected an attention_mask of shape [batch, {length}] (cached and new tokens), got {list(mask.shape)}"
            )
        real = mask.bool()
        if bool(real.all()):
            return cls()
        # A row of padding alone happens in a chunk of a longer prompt; a whole prompt of it is refused by check_rows.
        starts = torch.where(real.any(1), real.int().argmax(1), length)
        if torch.equal(real, torch.arange(length)[None] >= starts[:, None]):
            return cls(starts=starts)
        return cls(mask=real)

    def inputs(self, length: int, mask_name: str = "attention_mask") -> dict[str, jax.Array]:
        """Returns the mask arrays of a forward over `length` keys."""
        if self.starts is not None:
            return {"starts": to_device(self.starts.numpy(), np.int32)}
        if self.mask is not None:
            mask = torch.nn.functional.pad(self.mask, (0, length - self.mask.shape[1]), value=True)
            return {mask_name: to_device(mask.numpy(), bool)}
        return {}


def is_own_mask(mask: Any) -> bool:
    """Returns whether `mask` is [batch, heads, queries, keys], or such masks by layer type."""
    return isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and mask.ndim > 2)


def own_mask(mask: Any, num_keys: int, length: int) -> Any:
    """Returns the caller's attention mask padded to `length` keys, which are masked.

    Raises:
        InvalidArgumentError: the dtype or the number of keys does not fit.
    """
    if isinstance(mask, dict):
        return {kind: own_mask(each, num_keys, length) for kind, each in mask.items() if each is not None}
    if mask.ndim != 4 or mask.shape[-1] != num_keys or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise InvalidArgumentError(
            f"attention_mask: expected bool or float [batch, 1, queries, {num_keys}] (cached and new tokens), or "
            f"[batch, {num_keys}], got {mask.dtype} {list(mask.shape)}"
        )
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return to_jax_array(torch.nn.functional.pad(mask, (0, length - num_keys), value=hidden))


def check_rows(mask: torch.Tensor) -> None:
    """Raises InvalidArgumentError if a row of the attention mask [batch, len] is all padding."""
    empty = (~mask.bool().any(-1)).nonzero()
    if len(empty):
        raise InvalidArgumentError(
            f"expected a token in every row of the batch, got only padding in row {int(empty[0, 0])}; remove the row"
        )


@dataclasses.dataclass(frozen=True)
class NewTokenBatch:
    """A forward's new tokens on their way to the device."""

    name: str  # such as "input_ids" or "inputs_embeds"
    tensor: torch.Tensor  # int64[batch, len] or float[batch, len, hidden]
    padded_len: int

    @property
    def batch(self) -> int:
        """Rows."""
        return self.tensor.shape[0]

    @property
    def len(self) -> int:
        """Tokens per row before padding."""
        return self.tensor.shape[1]


def pad_tokens(tensor: torch.Tensor, length: int) -> jax.Array:
    """Pads ids [batch, len] or embeddings [batch, len, hidden] on the right with zeros."""
    missing = length - tensor.shape[1]
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros((tensor.shape[0], missing, *tensor.shape[2:]))], 1)
    return to_jax_array(tensor)


def pad_positions(tensor: torch.Tensor, length: int) -> jax.Array:
    """Pads positions [batch, len] or [axes, batch, len] on the right with the last value."""
    missing = length - tensor.shape[-1]
    if missing:
        tensor = torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], missing)], -1)
    return to_jax_array(tensor)


def cut(
    fields: dict[str, Any], query: NewTokenBatch, past: int, keep: Any, cache: DeviceCache | None
) -> dict[str, Any]:
    """Takes the padding off again."""
    cut = dict(fields)
    if "logits" in cut and (isinstance(keep, torch.Tensor) or keep != 1):
        # Without padding there is nothing to take off: some models put images before the text, and these logits, too.
        logits = cut["logits"] if query.len == query.padded_len else cut["logits"][:, : query.len]
        cut["logits"] = logits if isinstance(keep, torch.Tensor) else logits[:, -keep:]
    if "last_hidden_state" in cut:
        cut["last_hidden_state"] = cut["last_hidden_state"][:, : query.len]
    for name in ("hidden_states", "decoder_hidden_states"):
        if cut.get(name) is not None:
            cut[name] = tuple(layer[:, : query.len] for layer in cut[name])
    for name in ("attentions", "decoder_attentions"):
        if cut.get(name) is not None:
            cut[name] = tuple(_cut_keys(cut[name], query, past, [] if cache is None else cache.states))
    if cut.get("cross_attentions") is not None and cache is not None and cache.encoder_len:
        cut["cross_attentions"] = tuple(layer[..., : cache.encoder_len] for layer in cut["cross_attentions"])
    return cut


def _cut_keys(layers: Sequence[Any], query: NewTokenBatch, past: int, states: Sequence[Any]) -> Iterator[Any]:
    """Yields attention weights [batch, heads, query, key] of each layer without padding."""
    for index, layer in enumerate(layers):
        state = states[index] if index < len(states) else None
        first = 0
        if isinstance(state, AttentionLayer) and state.window is not None:
            first = max(0, past - state.window + 1)  # a sliding layer of transformers has forgotten the rest
        yield None if layer is None else layer[:, :, : query.len, first : past + query.len]


class FurtherLogits:
    """Tells which calls of a module return logits of a second head, by the names of arguments.

    Such a head may read the last token: it would read padding.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._may_come = may_have_further_logits(module)
        self._known: dict[frozenset[str], bool] = {}

    def come(self, given: dict[str, Any], call: Callable[[], Any], program: ModelProgram, weights: Any) -> bool:
        """Tells whether a call does, or may.

        `call` returns its arguments without padding, and its specification.
        """
        kind = frozenset(name for name, value in given.items() if value is not None)
        if self._may_come and kind not in self._known:
            (states, offset, inputs), spec = call()
            forward = functools.partial(program.forward, spec=spec)
            try:
                fields, _ = jax.eval_shape(forward, weights, states, offset, inputs)
                self._known[kind] = has_further_logits(fields)
            except NEEDS_VALUES:  # its code decides by values, such as those of padding
                self._known[kind] = True
        return self._may_come and self._known[kind]
