"""Refusal of ``torch.autocast`` in a model's code."""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.bridge.views import DEVICE, default_env
from model_adapters.errors import UnsupportedModelError


def install() -> None:
    """Makes operators inside of an enabled ``torch.autocast`` an error."""
    env = default_env()
    theirs, is_enabled = env.dispatch, torch.is_autocast_enabled

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if is_enabled("cpu") or is_enabled(DEVICE.type):
            raise UnsupportedModelError(
                "torch.autocast: expected code outside of it, since a program on JAX computes in the dtypes of its "
                "tensors; convert them by .to(dtype), or load the model in that dtype"
            )
        return theirs(func, types, args, kwargs)

    env.dispatch = dispatch
