"""Converts arguments of a call to tensors, and refuses contexts that a program cannot see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.bridge.views import is_view, jax_view, to_torch_tensor
from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from model_adapters.program.module_hooks import has_global_hooks

_TOKENS = frozenset({"inputs", "input_ids", "attention_mask", "position_ids", "token_type_ids", "decoder_input_ids"})
"""Arguments for which lists of numbers are taken, too."""


def on_host(name: str, value: Any) -> Any:
    """Returns `value` with CPU tensors in place of JAX and NumPy arrays and of torch views.

    Integers become int64, PyTorch's dtype of ids. Other values are unchanged.

    Raises:
        InvalidArgumentError: a tensor on another device, or an array of objects; names the argument `name`.
    """
    if isinstance(value, torch.Tensor):
        if is_view(value):
            value = to_torch_tensor(jax_view(value))
        if value.device.type != "cpu":
            raise InvalidArgumentError(
                f"{name}: expected a tensor on the CPU, where callers of a model on JAX have theirs, got one on "
                f'{value.device}; call .to("cpu") or .to(model.device)'
            )
        return value.long() if value.dtype == torch.int32 and value.ndim else value
    if isinstance(value, jax.Array | np.ndarray):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" and str(array.dtype) != "bfloat16":
            raise InvalidArgumentError(f"{name}: expected an array of numbers, got one of {array.dtype}")
        if array.dtype.kind in "iu":
            array = array.astype(np.int64)
        return to_torch_tensor(jax.numpy.asarray(array)) if str(array.dtype) == "bfloat16" else torch.tensor(array)
    if isinstance(value, list) and name in _TOKENS and value and not isinstance(value[0], torch.Tensor):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{name}: expected a tensor int64[batch, len], got a list that makes none ({error}); pad its rows to "
                "one length, with an attention_mask"
            ) from error
    return value


def all_on_host(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments by name, each as `on_host` converts it."""
    return {name: on_host(name, value) for name, value in given.items()}


def check_surroundings() -> None:
    """Raises an error for PyTorch contexts that would not reach a compiled program."""
    if torch.is_autocast_enabled("cpu"):
        raise UnsupportedArgumentError(
            "torch.autocast: expected a call outside of it, since a model on JAX computes in the dtype of its weights; "
            "load the model in that dtype, or call model.to(torch.bfloat16)"
        )
    if has_global_hooks():
        raise UnsupportedArgumentError(
            "expected no forward hooks on all modules of the process, got some (register_module_forward_hook); "
            "set them on the parts of the model"
        )


def check_positions_kept(keep: Any, length: int) -> Any:
    """Returns ``logits_to_keep`` for `length` tokens.

    It is a number, or positions int64[n] counted from 0.

    Raises:
        InvalidArgumentError: positions are out of range, or there are none.
    """
    if not isinstance(keep, torch.Tensor):
        return keep
    if keep.ndim > 1 or keep.is_floating_point():
        raise InvalidArgumentError(
            f"logits_to_keep: expected a number or positions int[n], got {keep.dtype} of shape {list(keep.shape)}"
        )
    keep = keep.nonzero().flatten() if keep.dtype == torch.bool else keep.reshape(-1)
    if keep.numel() and (int(keep.min()) < -length or int(keep.max()) >= length):
        raise InvalidArgumentError(
            f"logits_to_keep: expected positions from {-length} to {length - 1}, got {int(keep.min())} to "
            f"{int(keep.max())}; the call has {length} tokens"
        )
    return keep % length
