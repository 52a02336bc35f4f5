"""How much of an encoder's output a decoder sees, by the mask over the encoder's input that both are given."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedModel

CONVOLVED = frozenset({"seamless_m4t", "seamless_m4t_v2"})
"""Types whose decoder counts how many outputs the last convolution of its encoder of sounds makes of what is real."""


@dataclasses.dataclass(frozen=True)
class SourceMask:
    """A mask with ones first: as many outputs are seen by it as it has ones, or as a convolution makes of so many.

    Attributes:
        stride: of the convolution, which pads half of its kernel on both sides.
        kernel: its size.
    """

    stride: int = 1
    kernel: int = 1

    def seen(self, num_inputs: np.ndarray) -> np.ndarray:
        """Outputs that are seen where so many inputs are real."""
        return (num_inputs + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1

    def argument(self, padded_len: int, length: jax.Array | int) -> jax.Array:
        """The mask int32[1, num_inputs] by which the first `length` of `padded_len` outputs are seen."""

        def num_inputs(num_outputs: jax.Array | int) -> jax.Array | int:
            return (num_outputs - 1) * self.stride + self.kernel - 2 * (self.kernel // 2)

        return (jnp.arange(num_inputs(padded_len)) < num_inputs(length)).astype(jnp.int32)[None]


def mask_over_sounds(module: PreTrainedModel) -> SourceMask | None:
    """How the decoder of `module` sees the output of an encoder of sounds; None where that is not known."""
    config = module.config
    return SourceMask(config.adaptor_stride, config.adaptor_kernel_size) if config.model_type in CONVOLVED else None
