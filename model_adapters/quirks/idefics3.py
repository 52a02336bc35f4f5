"""Idefics3 leaves out images of zeros alone, of a number that only the host could count."""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.real_images import image_features


def _get_image_features(
    self: Any, pixel_values: torch.Tensor, pixel_attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> Any:
    kwargs.pop("return_dict", None)
    return image_features(
        self,
        pixel_values,
        pixel_attention_mask,
        lambda count, size: count > 0,
        lambda features, patches: self.connector(features),
        **kwargs,
    )


REPLACED = {"Idefics3Model.get_image_features": _get_image_features}
