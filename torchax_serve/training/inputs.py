"""Arguments of a model's forward for a batch: masks that keep the examples of a row apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import to_torch_tensor
from model_adapters.errors import UnsupportedModelError
from torchax_serve.training.packing import TrainingBatch
from torchax_serve.training.trainable import TrainableModel, accepts

Inputs = Callable[[TrainingBatch], dict[str, Any]]
KINDS = {"full_attention", "sliding_attention"}
MAX_PROBE_ERROR = 0.02
"""Largest difference of logits, over the largest logit, between an example in a shared row and by itself."""


def inputs_of(model: TrainableModel, *, packing: bool) -> Inputs:
    """Returns the function from a batch to the arguments of the forward.

    Raises:
        UnsupportedModelError: examples cannot share a row of this model.
    """
    common = {"use_cache": False, "return_dict": False}
    if not packing:
        return lambda batch: {"input_ids": batch.tokens, "attention_mask": jnp.minimum(batch.segments, 1), **common}

    def inputs(batch: TrainingBatch) -> dict[str, Any]:
        seen = seen_tokens(batch.segments)
        return {
            "input_ids": batch.tokens,
            "position_ids": batch.positions,
            "attention_mask": additive_masks(model, seen),
            **common,
        }

    _check_apart(model, inputs)
    return inputs


def seen_tokens(segments: Any) -> jax.Array:
    """Returns which tokens see which, bool[num_rows, row_len, row_len].

    They see earlier ones of the same segment.

    Args:
        segments: int32[num_rows, row_len].
    """
    positions = jnp.arange(segments.shape[1])
    return (positions[:, None] >= positions[None]) & (segments[:, :, None] == segments[:, None])


def additive_masks(model: TrainableModel, seen: Any) -> Any:
    """Returns what is added to the scores, [num_rows, 1, row_len, row_len], by kind of layer.

    Args:
        model: The model.
        seen: bool[num_rows, row_len, row_len], which tokens see which in a layer without a window.

    Raises:
        UnsupportedModelError: the model has layers that take no such mask.
    """
    config = model.base.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not accepts(model.base, "position_ids"):
        raise _unsupported(model, "its forward takes no positions")
    if kinds - KINDS:
        raise _unsupported(model, f"it has layers of kind {min(kinds - KINDS)}")
    dtype = jnp.dtype(str(model.base.dtype).removeprefix("torch."))

    def added(is_seen: Any) -> jax.Array:
        return jnp.where(is_seen[:, None], 0, jnp.finfo(dtype).min).astype(dtype)

    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is None or kinds == {"full_attention"}:
        return added(seen)
    positions = jnp.arange(seen.shape[-1])
    near = added(seen & (positions[:, None] - positions[None] < window))
    return {"full_attention": added(seen), "sliding_attention": near} if kinds else near


def _unsupported(model: TrainableModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{model.name}: expected a model whose examples can share a row, and {why}; choose packing=False"
    )


def _check_apart(model: TrainableModel, inputs: Inputs) -> None:
    """Raises UnsupportedModelError if an example gets other logits in a shared row.

    Both forwards are eager PyTorch's.
    """
    lens = (6, 5)
    tokens = np.arange(3, 3 + sum(lens), dtype=np.int32)[None]
    segments = np.repeat([1, 2], lens).astype(np.int32)[None]
    positions = np.concatenate([np.arange(length) for length in lens]).astype(np.int32)[None]
    packed = _eager(model, inputs(TrainingBatch(tokens, segments, positions, tokens)))
    last = slice(lens[0], None)
    single = TrainingBatch(tokens[:, last], segments[:, last] - 1, positions[:, last], tokens[:, last])
    separate = _eager(model, inputs(single))
    error = float((packed[:, last] - separate).abs().max() / separate.abs().max())
    if not error <= MAX_PROBE_ERROR:
        raise _unsupported(model, f"their logits change by {error:.0%} there")


def _eager(model: TrainableModel, given: dict[str, Any]) -> torch.Tensor:
    def tensor(value: Any) -> Any:
        if not isinstance(value, jax.Array | np.ndarray):
            return value
        made = to_torch_tensor(jnp.asarray(value))
        return made if made.is_floating_point() else made.long()

    with torch.no_grad():
        logits: torch.Tensor = model.module(**jax.tree.map(tensor, given))[0]
    return logits.float()
