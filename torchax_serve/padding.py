"""Which tokens of a batch are real: none padded, padded on the left, or any other 2D mask."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import torch

from model_adapters.arrays import from_host
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


def check_rows(mask: torch.Tensor) -> None:
    """Raises InvalidArgumentError if a row of the attention mask [batch, len] is padding from end to end."""
    empty = (~mask.bool().any(-1)).nonzero()
    if len(empty):
        raise InvalidArgumentError(
            f"expected a token in every row of the batch, got only padding in row {int(empty[0, 0])}; remove the row"
        )
