"""The decoder's mask for an encoder output that is padded on the right."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedModel

from model_adapters import quirks


@dataclasses.dataclass(frozen=True)
class SourceMask:
    """A mask over encoder inputs, with ones first.

    The decoder sees one output per real input, or per step of the convolution.

    Attributes:
        stride: Stride of the encoder's convolutions, as if they were one; 1: none.
        kernel: Kernel size of that convolution; 1: none.
        padding: What it pads on both sides.
        is_in_output: Whether the decoder reads a mask that comes with the output, and none over inputs.
    """

    stride: int = 1
    kernel: int = 1
    padding: int = 0
    is_in_output: bool = False

    def seen(self, num_inputs: np.ndarray) -> np.ndarray:
        """Returns the number of visible outputs, int[...], for numbers of real inputs int[...]."""
        return (num_inputs + 2 * self.padding - self.kernel) // self.stride + 1

    def argument(self, padded_len: int, length: jax.Array | int) -> jax.Array:
        """Returns the mask int32[1, num_inputs] that shows `length` of `padded_len` outputs.

        The first `length` outputs are seen.
        """

        def num_inputs(num_outputs: jax.Array | int) -> jax.Array | int:
            return (num_outputs - 1) * self.stride + self.kernel - 2 * self.padding

        return (jnp.arange(num_inputs(padded_len)) < num_inputs(length)).astype(jnp.int32)[None]


def mask_over_audio(module: PreTrainedModel) -> SourceMask | None:
    """Returns the mask for the output of `module`'s audio encoder; None where it is not known."""
    quirk = quirks.of(module)
    if quirk.encoder_returns_mask:
        return SourceMask(is_in_output=True)
    found = None if quirk.encoder_mask is None else quirk.encoder_mask(module.config)
    return None if found is None else SourceMask(*found)
