"""Lowering of bags of embeddings, which torchax 0.0.13 has in part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import set_lowering
from model_adapters.errors import UnsupportedModelError


def install() -> None:
    """Registers the lowering in torchax's table."""
    set_lowering(torch.nn.functional.embedding_bag, _embedding_bag)


def _embedding_bag(
    input: jax.Array,
    weight: jax.Array,
    offsets: jax.Array | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> jax.Array:
    """Computes ``embedding_bag`` of bags int[n, size], or of int[m] that begin at `offsets`.

    torchax 0.0.13 mixes up the weights of samples. An empty bag is zero.
    """
    if max_norm is not None:
        raise UnsupportedModelError(
            f"embedding_bag: expected max_norm=None, got {max_norm}, by which it would write into its weights"
        )
    if scale_grad_by_freq:  # PyTorch's own gradient takes the counts of other rows
        raise UnsupportedModelError("embedding_bag: expected scale_grad_by_freq=False, got True; leave it out")
    if input.ndim == 2:
        num_bags = input.shape[0]
        bags: Any = np.repeat(np.arange(num_bags), input.shape[1])
    else:
        starts = jnp.asarray(offsets)
        num_bags = starts.shape[0] - include_last_offset
        bags = jnp.searchsorted(starts, jnp.arange(input.shape[0]), side="right") - 1
    chosen = input.reshape(-1)
    rows = weight[chosen]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    is_counted = jnp.ones(rows.shape[:1], bool)
    if padding_idx is not None:
        is_counted = chosen != padding_idx % weight.shape[0]
    counts = jax.ops.segment_sum(is_counted.astype(rows.dtype), bags, num_bags)[:, None]
    if mode == "max":
        largest = jax.ops.segment_max(jnp.where(is_counted[:, None], rows, -jnp.inf), bags, num_bags)
        return jnp.where(counts > 0, largest, 0)
    sums = jax.ops.segment_sum(jnp.where(is_counted[:, None], rows, 0), bags, num_bags)
    return sums if mode == "sum" else sums / jnp.maximum(counts, 1)
