"""Masks of objects at points and in boxes (SAM to SAM 3), of images that are encoded once."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from typing import Any

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.tasks.results import PromptedMask

MAX_IMAGES = 8
"""Images whose embeddings are kept; one of SAM takes 4 MB."""
MAX_VALUES = 300_000_000
"""Values of the masks of one call, which are float32 before they are cut at zero."""
CANDIDATES = 3
"""Masks of an object, where a model is asked for several."""


@dataclasses.dataclass(frozen=True)
class Prompts:
    """What is asked for: points of one object, or boxes, each of an object.

    Attributes:
        points: Pixels (x, y).
        labels: 1 for points inside of the object, 0 for those outside; None: all are inside.
        boxes: (left, top, right, bottom) in pixels.
        multimask_output: Whether each object has three candidates, rather than one mask.
    """

    points: list[list[float]] | None
    labels: list[int] | None
    boxes: list[list[float]] | None
    multimask_output: bool


class MaskDecoder:
    """A SAM model of any release: embeddings of the last images, and masks of prompts.

    Args:
        module: The model, whose forward runs on JAX.
        runtime: Of the model.
        processor: The checkpoint's image processor.
    """

    def __init__(self, module: Any, runtime: ModelRuntime, processor: Any) -> None:
        self._module, self._runtime, self._processor = module, runtime, processor
        self._images: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()
        self.num_encoded = 0

    def id_of(self, image: Any) -> str:
        """Returns the name by which the embedding of an image is found, for the weights of now."""
        pixels = np.asarray(image)
        weights = f"{self._runtime.weights_version} {self._runtime.num_changes}"
        return hashlib.sha256(f"{pixels.shape} {weights}".encode() + pixels.tobytes()).hexdigest()

    def masks(self, image: Any, image_id: str | None, prompts: Prompts) -> list[list[PromptedMask]]:
        """Returns the masks of each object, the best first.

        Args:
            image: PIL image; None if `image_id` is given.
            image_id: `id_of` an image that was encoded before.
            prompts: What is asked for.

        Raises:
            InvalidArgumentError: the embedding of `image_id` is not kept; masks of more boxes than memory is for.
        """
        known = self._encoded(image, image_id)
        original = known["original"]
        width, height = int(original[1]), int(original[0])
        most = max(1, MAX_VALUES // (CANDIDATES * width * height))
        if prompts.boxes is not None and len(prompts.boxes) > most:
            raise InvalidArgumentError(
                f"boxes: expected at most {most} for an image of {width} x {height} pixels, got {len(prompts.boxes)}; "
                "ask for them in several calls"
            )
        scale = (known["reshaped"].double() / original.double()).flip(-1)  # width, height
        given: dict[str, Any] = {**known["embeddings"], "multimask_output": prompts.multimask_output}
        if (points := prompts.points) is not None:
            given["input_points"] = (torch.tensor(points, dtype=torch.float64) * scale).float()[None, None]
            given["input_labels"] = torch.tensor(prompts.labels or [1] * len(points))[None, None]
        if prompts.boxes is not None:
            corners = torch.tensor(prompts.boxes, dtype=torch.float64).reshape(-1, 2, 2) * scale
            given["input_boxes"] = corners.float().reshape(1, -1, 4)
        with torch.no_grad():
            output = self._module(**given)
        sizes = [original[None]] + ([known["reshaped"][None]] if known["is_padded"] else [])
        found = self._processor.post_process_masks(output.pred_masks.float(), *sizes)[0].numpy()
        scores = output.iou_scores[0].float().numpy()
        return [
            [PromptedMask(masks[index] > 0, float(row[index])) for index in np.argsort(-row, kind="stable")]
            for masks, row in zip(found, scores, strict=True)
        ]

    def _encoded(self, image: Any, image_id: str | None) -> dict[str, Any]:
        """Returns the embedding and the sizes (height, width) of an image; drops old ones."""
        key = self.id_of(image) if image_id is None else image_id
        if key not in self._images:
            if image is None:
                raise InvalidArgumentError(
                    f"image_id: expected that of one of the last {MAX_IMAGES} images, got {key[:80]!r}; give the image "
                    "again"
                )
            inputs = self._processor(image, return_tensors="pt")
            dtype = next(self._module.parameters()).dtype
            pixels_of_model = inputs["pixel_values"].to(dtype)
            made = self._runtime.call_method("get_image_embeddings", {"pixel_values": pixels_of_model})
            # SAM keeps the shape of an image and pads it; later releases stretch it to a square.
            is_padded = "reshaped_input_sizes" in inputs
            self._images[key] = {
                "embeddings": self._arguments(made),
                "original": torch.as_tensor(inputs["original_sizes"])[0],
                "reshaped": torch.as_tensor(
                    inputs["reshaped_input_sizes"] if is_padded else [pixels_of_model.shape[-2:]]
                )[0],
                "is_padded": is_padded,
            }
            self.num_encoded += 1
            while len(self._images) > MAX_IMAGES:
                self._images.popitem(last=False)
        self._images.move_to_end(key)
        return self._images[key]

    def _arguments(self, embeddings: Any) -> dict[str, Any]:
        """Returns the arguments of the forward for what the encoder returns."""
        if type(self._module).__name__ == "SamHQModel":  # whose decoder reads the encoder's layers, too
            return {"image_embeddings": embeddings[0], "intermediate_embeddings": embeddings[1]}
        return {"image_embeddings": embeddings}


def checked_prompts(points: Any, labels: Any, boxes: Any, multimask_output: Any) -> Prompts:
    """Returns the prompts of a call; one box becomes a list of it.

    Raises:
        InvalidArgumentError: no prompt, or one of another form.
    """
    if points is None and boxes is None:
        raise InvalidArgumentError("masks: expected points or boxes, got none; give points=[(x, y)]")
    if boxes is not None and len(boxes) == 4 and np.ndim(boxes) == 1:
        boxes = [boxes]
    for name, value, size, what in (("points", points, 2, "(x, y)"), ("boxes", boxes, 4, "(left, top, right, bottom)")):
        if value is None:
            continue
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            array = np.zeros(0)
        if array.ndim != 2 or array.shape[1] != size or not len(array) or not np.isfinite(array).all():
            raise InvalidArgumentError(f"{name}: expected a list of {what} in pixels, got {value!r:.80}")
    if points is not None and boxes is not None and len(boxes) != 1:
        raise InvalidArgumentError(f"boxes: expected one box with points, which are of one object, got {len(boxes)}")
    is_list = labels is None or (points is not None and len(labels) == len(points) and set(labels) <= {0, 1})
    if not is_list:
        raise InvalidArgumentError(f"labels: expected 1 (inside) or 0 (outside) for each point, got {labels!r:.80}")
    if type(multimask_output) is not bool:
        raise InvalidArgumentError(f"multimask_output: expected True or False, got {multimask_output!r:.80}")
    rows = [None if value is None else np.asarray(value, np.float64).tolist() for value in (points, boxes)]
    return Prompts(rows[0], None if labels is None else [int(each) for each in labels], rows[1], multimask_output)
