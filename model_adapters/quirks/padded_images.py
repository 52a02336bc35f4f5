"""Padding images of a batch, which models of the Idefics family skip.

All their pixels are zero. The number of padding images is known only after the step. The program is made for batches
without padding images and checks that there are none; a processor pads if the prompts of a batch have different numbers
of images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def image_features_by(
    is_real_patch: Callable[[torch.Tensor, int], torch.Tensor],
    connect: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[..., Any]:
    """Returns ``get_image_features`` of such a base model.

    Args:
        is_real_patch: bool from the number of real pixels of a patch and the number that it has.
        connect: features of the text's width, from the model, those of the encoder and the mask of patches.
    """

    def get_image_features(
        self: Any, pixel_values: torch.Tensor, pixel_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        kwargs.pop("return_dict", None)
        batch, num_images = pixel_values.shape[:2]
        pixels = pixel_values.to(dtype=self.dtype).reshape(batch * num_images, *pixel_values.shape[2:])
        torch._check_tensor_all((pixels != 0.0).flatten(1).any(1))
        if pixel_attention_mask is None:
            mask = torch.ones(pixels.shape[0], *pixels.shape[2:], dtype=torch.bool, device=pixels.device)
        else:
            mask = pixel_attention_mask.reshape(batch * num_images, *pixel_attention_mask.shape[2:])
        size = self.config.vision_config.patch_size
        rows, columns = mask.shape[1] // size, mask.shape[2] // size
        cut = mask[:, : rows * size, : columns * size].reshape(-1, rows, size, columns, size)
        patches = is_real_patch(cut.sum(dim=(2, 4)), size * size)
        outputs = self.vision_model(pixel_values=pixels, patch_attention_mask=patches, return_dict=True, **kwargs)
        features = connect(self, outputs.last_hidden_state, patches)
        features = features.reshape(batch, -1, features.shape[-1])
        outputs.pooler_output = [features[row] for row in range(batch)]
        return outputs

    return get_image_features


any_pixel_counts = image_features_by(
    lambda count, size: count > 0, lambda model, features, patches: model.connector(features)
)
"""``get_image_features`` of a model for which a patch with one real pixel is real."""
