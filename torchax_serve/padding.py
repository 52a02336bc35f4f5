"""Which tokens of a batch are real: none padded, padded on the left, or any other 2D mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.arrays import from_host
from model_adapters.bridge import to_jax_array
from model_adapters.errors import InvalidArgumentError


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
        """The padding that a 2D attention mask [batch, length] describes.

        Raises:
            InvalidArgumentError: another shape.
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
        """The arrays a forward over `length` keys needs; positions beyond the mask are causal's business."""
        if self.starts is not None:
            return {"starts": from_host(self.starts.numpy(), np.int32)}
        if self.mask is not None:
            mask = torch.nn.functional.pad(self.mask, (0, length - self.mask.shape[1]), value=True)
            return {mask_name: from_host(mask.numpy(), bool)}
        return {}


def is_own_mask(mask: Any) -> bool:
    """Whether `mask` says who sees whom: [batch, heads, queries, keys], or such masks by kind of layer."""
    return isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and mask.ndim > 2)


def own_mask(mask: Any, num_keys: int, length: int) -> Any:
    """The array of a mask of the caller's own, its `num_keys` keys filled up to `length` with keys that nobody sees.

    Raises:
        InvalidArgumentError: another dtype, or another number of keys.
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
    """Raises InvalidArgumentError if a row of the attention mask [batch, len] is padding from end to end."""
    empty = (~mask.bool().any(-1)).nonzero()
    if len(empty):
        raise InvalidArgumentError(
            f"expected a token in every row of the batch, got only padding in row {int(empty[0, 0])}; remove the row"
        )
