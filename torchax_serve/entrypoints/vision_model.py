"""`VisionModel`: labels, embeddings, boxes, masks and depths of images."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.program.model_program import CallSpec
from torchax_serve.entrypoints.task_model import TaskModel, one_or_all
from torchax_serve.pooling.queue import QueuedTexts
from torchax_serve.tasks.batches import run_batches
from torchax_serve.tasks.images import ImageLike, images_of, is_single
from torchax_serve.tasks.prompted_masks import MaskDecoder, checked_prompts
from torchax_serve.tasks.results import Box, DepthMap, Detection, PromptedMask, ScoredLabel, Segment
from torchax_serve.validation.argument_hints import refuses_unknown

SUBTASKS = ("semantic", "instance", "panoptic")
POOLINGS_OF_IMAGES = ("pooler", "cls", "mean")
"""pooler: the model's own; cls: the first of its last hidden states; mean: the mean of them."""

Images = ImageLike | Sequence[ImageLike]


class VisionModel(TaskModel):
    """A model with a head for images; made by `serve`.

    An image is a path, a PIL image or pixels uint8[height, width, 3]. Results are those of transformers' pipeline with
    the checkpoint's processor. Images of all threads that wait are computed together, those of equal shapes in a batch.
    A method that the model's head does not have raises UnsupportedModelError, which names those that it has.
    """

    @refuses_unknown
    def classify_images(
        self,
        images: Images,
        *,
        labels: Sequence[str] | None = None,
        template: str | None = None,
        top_k: int | None = 5,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[ScoredLabel] | list[list[ScoredLabel]]:
        """Returns labels of an image, the best first; of a list of images a list of those.

        Args:
            images: one image or several.
            labels: texts to choose from, for a model without labels of its own, such as CLIP or SigLIP.
            template: text around each of `labels`, with ``{}`` for it; None: "This is a photo of {}.".
            top_k: number of labels; None returns all.
            timeout_s: seconds after which the call ends with an error, looked at before each forward; None: never.
            queue_timeout_s: the same for a call that has not begun by then.

        Raises:
            UnsupportedModelError: the model does not classify images.
            InvalidArgumentError: no images, or one that cannot be read; labels are missing or not taken.
            QueueFullError: too many inputs are waiting.
            DeadlineError: a time limit has passed.
        """
        call = self._labelling(images, labels, template, top_k)
        return one_or_all(is_single(images), call.run(timeout_s, queue_timeout_s))

    @refuses_unknown
    async def aclassify_images(
        self,
        images: Images,
        *,
        labels: Sequence[str] | None = None,
        template: str | None = None,
        top_k: int | None = 5,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[ScoredLabel] | list[list[ScoredLabel]]:
        """Works as `classify_images` without blocking the event loop; cancelling ends it."""
        call = self._labelling(images, labels, template, top_k)
        return one_or_all(is_single(images), await call.run_async(timeout_s, queue_timeout_s))

    @refuses_unknown
    def detect(
        self,
        images: Images,
        *,
        labels: Sequence[str] | None = None,
        threshold: float | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[Detection] | list[list[Detection]]:
        """Returns the objects in an image with their boxes; of a list of images a list of those.

        Args:
            images: one image or several.
            labels: texts to look for, for a model without labels of its own, such as OWL-ViT.
            threshold: least score; None: 0.5, and 0.1 with `labels`.
            timeout_s, queue_timeout_s: as in `classify_images`, and errors likewise.
        """
        call = self._detecting(images, labels, threshold)
        return one_or_all(is_single(images), call.run(timeout_s, queue_timeout_s))

    @refuses_unknown
    async def adetect(
        self,
        images: Images,
        *,
        labels: Sequence[str] | None = None,
        threshold: float | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[Detection] | list[list[Detection]]:
        """Works as `detect` without blocking the event loop; cancelling ends it."""
        call = self._detecting(images, labels, threshold)
        return one_or_all(is_single(images), await call.run_async(timeout_s, queue_timeout_s))

    @refuses_unknown
    def segment(
        self,
        images: Images,
        *,
        subtask: Literal["semantic", "instance", "panoptic"] | None = None,
        threshold: float | None = None,
        mask_threshold: float | None = None,
        overlap_mask_area_threshold: float | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[Segment] | list[list[Segment]]:
        """Returns the labelled parts of an image; of a list of images a list of those.

        Args:
            images: one image or several.
            subtask: what parts are: one for each label ("semantic"), each object ("instance"), or both ("panoptic");
                None: the last that the processor has.
            threshold: least score of a part with a score; None: 0.9.
            mask_threshold: least value of a mask's pixels; None: 0.5.
            overlap_mask_area_threshold: least share of a part's own pixels that no other part takes; None: 0.5.
            timeout_s, queue_timeout_s: as in `classify_images`, and errors likewise.
        """
        shares = (threshold, mask_threshold, overlap_mask_area_threshold)
        call = self._segmenting(images, subtask, *shares)
        return one_or_all(is_single(images), call.run(timeout_s, queue_timeout_s))

    @refuses_unknown
    async def asegment(
        self,
        images: Images,
        *,
        subtask: Literal["semantic", "instance", "panoptic"] | None = None,
        threshold: float | None = None,
        mask_threshold: float | None = None,
        overlap_mask_area_threshold: float | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[Segment] | list[list[Segment]]:
        """Works as `segment` without blocking the event loop; cancelling ends it."""
        shares = (threshold, mask_threshold, overlap_mask_area_threshold)
        call = self._segmenting(images, subtask, *shares)
        return one_or_all(is_single(images), await call.run_async(timeout_s, queue_timeout_s))

    @refuses_unknown
    def depth(
        self, images: Images, *, timeout_s: float | None = None, queue_timeout_s: float | None = None
    ) -> DepthMap | list[DepthMap]:
        """Returns the depths of an image's pixels; arguments and errors as of `classify_images`."""
        return one_or_all(is_single(images), self._measuring(images).run(timeout_s, queue_timeout_s))

    @refuses_unknown
    async def adepth(
        self, images: Images, *, timeout_s: float | None = None, queue_timeout_s: float | None = None
    ) -> DepthMap | list[DepthMap]:
        """Works as `depth` without blocking the event loop; cancelling ends it."""
        return one_or_all(is_single(images), await self._measuring(images).run_async(timeout_s, queue_timeout_s))

    @refuses_unknown
    def embed_images(
        self,
        images: Images,
        *,
        pooling: str | None = None,
        normalize: bool = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray:
        """Returns embeddings of images: float32[dim] of one, float32[num_images, dim] of a list.

        Args:
            images: one image or several.
            pooling: "pooler", the model's own, "cls" or "mean" over its last hidden states; None: "pooler". Of a model
                of images and texts, such as CLIP, it is the embedding that is compared with those of texts.
            normalize: scale each embedding to length 1.
            timeout_s, queue_timeout_s: as in `classify_images`, and errors likewise.
        """
        rows = self._embedding_images(images, pooling, normalize).run(timeout_s, queue_timeout_s)
        return np.asarray(rows[0]) if is_single(images) else np.stack(rows)

    @refuses_unknown
    async def aembed_images(
        self,
        images: Images,
        *,
        pooling: str | None = None,
        normalize: bool = False,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> np.ndarray:
        """Works as `embed_images` without blocking the event loop; cancelling ends it."""
        call = self._embedding_images(images, pooling, normalize)
        rows = await call.run_async(timeout_s, queue_timeout_s)
        return np.asarray(rows[0]) if is_single(images) else np.stack(rows)

    @refuses_unknown
    def masks(
        self,
        image: ImageLike | None = None,
        *,
        points: Sequence[tuple[float, float]] | None = None,
        labels: Sequence[int] | None = None,
        boxes: Sequence[Any] | None = None,
        multimask_output: bool = True,
        image_id: str | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[list[PromptedMask]]:
        """Returns the masks of each prompted object in an image, the best first.

        The image is encoded at its first prompt; the embeddings of the last eight images are kept.

        Args:
            image: one image.
            points: pixels (x, y) of one object.
            labels: 1 for points inside of the object, 0 for those outside; None: all are inside.
            boxes: (left, top, right, bottom) in pixels, one or several, each of an object.
            multimask_output: three candidates of each object, for prompts that may mean several things; False: one.
            image_id: `image_id` of an image that had a prompt before, in place of `image`.
            timeout_s, queue_timeout_s: as in `classify_images`, and errors likewise.

        Raises:
            InvalidArgumentError: also an `image_id` whose embedding is not kept.
        """
        call = self._prompting(image, image_id, points, labels, boxes, multimask_output)
        (found,) = call.run(timeout_s, queue_timeout_s)
        return list(found)

    @refuses_unknown
    async def amasks(
        self,
        image: ImageLike | None = None,
        *,
        points: Sequence[tuple[float, float]] | None = None,
        labels: Sequence[int] | None = None,
        boxes: Sequence[Any] | None = None,
        multimask_output: bool = True,
        image_id: str | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> list[list[PromptedMask]]:
        """Works as `masks` without blocking the event loop; cancelling ends it."""
        call = self._prompting(image, image_id, points, labels, boxes, multimask_output)
        (found,) = await call.run_async(timeout_s, queue_timeout_s)
        return list(found)

    def image_id(self, image: ImageLike) -> str:
        """Returns a name of the image by its pixels, which `masks` takes in its place.

        It does while the embedding is kept.

        Raises:
            UnsupportedModelError: the model finds no masks of prompts.
            InvalidArgumentError: an image that cannot be read.
        """
        self._head_for("masks")
        return self._mask_decoder.id_of(_one_image(image))

    @functools.cached_property
    def _mask_decoder(self) -> MaskDecoder:
        return MaskDecoder(self._module, self.runtime, self._reader("image_processor"))

    def _prompting(
        self, image: ImageLike | None, image_id: str | None, points: Any, labels: Any, boxes: Any, multimask: bool
    ) -> QueuedTexts:
        self._head_for("masks")
        prompts = checked_prompts(points, labels, boxes, multimask)
        if (image is None) == (image_id is None):
            got = "none" if image is None else "both"
            raise InvalidArgumentError(f"image: expected one of image and image_id, got {got}")
        if image_id is not None and not isinstance(image_id, str):
            raise InvalidArgumentError(f"image_id: expected a text, got {type(image_id).__name__}")
        given = None if image is None else _one_image(image)

        def call(items: Sequence[Any]) -> list[list[list[PromptedMask]]]:
            return [self._mask_decoder.masks(*each) for each in items]

        return self._call_on_queue("masks", call, [(given, image_id, prompts)])

    def _labelling(
        self, images: Images, labels: Sequence[str] | None, template: str | None, top_k: int | None
    ) -> QueuedTexts:
        head = self._head_for("classify_images", takes_labels=labels is not None)
        if top_k is not None and (type(top_k) is not int or top_k < 1):
            raise InvalidArgumentError(f"top_k: expected a number of labels >= 1, got {top_k!r}; None returns all")
        if template is not None and (labels is None or not isinstance(template, str) or "{}" not in template):
            raise InvalidArgumentError(f"template: expected a text with {{}}, and labels for it, got {template!r}")
        params: dict[str, Any] = {}
        if labels is None:
            params["top_k"] = self._config.num_labels
        else:
            params["candidate_labels"] = _checked_labels(labels)
            params |= {} if template is None else {"hypothesis_template": template}
        key = (tuple(labels or ()), template, top_k)

        def call(items: Sequence[Any]) -> list[list[ScoredLabel]]:
            found = self._pipeline(head).run(items, **params)
            return [[ScoredLabel(each["label"], each["score"]) for each in row[:top_k]] for row in found]

        return self._call_on_queue((head.pipeline, key), call, images_of(images))

    def _detecting(self, images: Images, labels: Sequence[str] | None, threshold: float | None) -> QueuedTexts:
        head = self._head_for("detect", takes_labels=labels is not None)
        _check_share("threshold", threshold)
        params = {} if threshold is None else {"threshold": threshold}
        names = None if labels is None else _checked_labels(labels)

        def call(items: Sequence[Any]) -> list[list[Detection]]:
            given = items if names is None else [{"image": each, "candidate_labels": names} for each in items]
            found = self._pipeline(head).run(given, **params)
            return [[Detection(each["label"], each["score"], Box(**each["box"])) for each in row] for row in found]

        return self._call_on_queue((head.pipeline, tuple(names or ()), threshold), call, images_of(images))

    def _segmenting(self, images: Images, subtask: str | None, *shares: float | None) -> QueuedTexts:
        head = self._head_for("segment")
        if subtask is not None:
            processor, name = self._reader("image_processor"), f"post_process_{subtask}_segmentation"
            if subtask not in SUBTASKS or not hasattr(processor, name):
                known = [each for each in SUBTASKS if hasattr(processor, f"post_process_{each}_segmentation")]
                raise InvalidArgumentError(
                    f"subtask: expected {' or '.join(known)}, which {self.name} has, got {subtask!r}"
                )
        names = ("threshold", "mask_threshold", "overlap_mask_area_threshold")
        for name, value in zip(names, shares, strict=True):
            _check_share(name, value)
        given = {"subtask": subtask, **dict(zip(names, shares, strict=True))}
        params = {name: value for name, value in given.items() if value is not None}

        def call(items: Sequence[Any]) -> list[list[Segment]]:
            found = self._pipeline(head).run(items, **params)
            return [[Segment(e["label"], e["score"], np.asarray(e["mask"]) > 0) for e in row] for row in found]

        return self._call_on_queue((head.pipeline, *given.values()), call, images_of(images))

    def _measuring(self, images: Images) -> QueuedTexts:
        head = self._head_for("depth")

        def call(items: Sequence[Any]) -> list[DepthMap]:
            found = self._pipeline(head).run(items)
            return [DepthMap(each["predicted_depth"].numpy(), each["depth"]) for each in found]

        return self._call_on_queue(head.pipeline, call, images_of(images))

    def _embedding_images(self, images: Images, pooling: str | None, normalize: bool) -> QueuedTexts:
        self._head_for("embed_images")
        if pooling is not None and (self._has_features or pooling not in POOLINGS_OF_IMAGES):
            expected = "None" if self._has_features else f"one of {', '.join(POOLINGS_OF_IMAGES)}"
            raise InvalidArgumentError(f"pooling: expected {expected} for {self.name}, got {pooling!r}")
        call = functools.partial(self._embedded, pooling=pooling or "pooler", normalize=normalize)
        return self._call_on_queue(("embed_images", pooling, normalize), call, images_of(images))

    @property
    def _has_features(self) -> bool:
        """Whether the model compares images with texts."""
        return hasattr(self._module, "get_image_features")

    def _embedded(self, images: Sequence[Any], *, pooling: str, normalize: bool) -> list[np.ndarray]:
        processor = self._reader("image_processor")
        inputs = [{"pixel_values": processor(image, return_tensors="pt")["pixel_values"]} for image in images]
        inputs = [{name: value.to(self.dtype) for name, value in each.items()} for each in inputs]
        run = self._features if self._has_features else self._hidden_states
        rows = [_pooled(each, pooling, self.name) for each in run_batches(inputs, run)]
        return [row / max(float(np.linalg.norm(row)), 1e-12) if normalize else row for row in rows]

    def _features(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = self.runtime.call_method("get_image_features", batch)
        return {"pooler_output": found if isinstance(found, torch.Tensor) else found["pooler_output"]}

    def _hidden_states(self, batch: dict[str, Any]) -> dict[str, Any]:
        module = self._module
        part = next(name for name, child in module.named_modules() if child is module.base_model)
        found = self.runtime.submodule(part).forward(batch, CallSpec(), None)
        return {name: value for name, value in found.items() if name in ("pooler_output", "last_hidden_state")}


def _pooled(fields: dict[str, Any], pooling: str, name: str) -> np.ndarray:
    """Returns the embedding of an image, float32[dim], from the outputs of its forward."""
    if pooling == "pooler":
        if (pooled := fields.get("pooler_output")) is None:
            raise UnsupportedModelError(
                f"pooling: expected a model with a pooler, got {name}; pass pooling='cls' or pooling='mean'"
            )
        return np.asarray(pooled.flatten().numpy())
    hidden = fields["last_hidden_state"]
    tokens = hidden[0] if hidden.ndim == 3 else hidden[0].flatten(1).T  # of a convolution: [channels, height, width]
    return np.asarray((tokens[0] if pooling == "cls" else tokens.mean(0)).numpy())


def _one_image(image: ImageLike) -> Any:
    """Returns a PIL image of what the caller gives; raises InvalidArgumentError for a list."""
    if not is_single(image):
        raise InvalidArgumentError(f"image: expected one image, got a list of {len(image)}; call masks for each")
    return images_of(image)[0]


def _checked_labels(labels: Sequence[str]) -> list[str]:
    is_list = isinstance(labels, list | tuple)
    if not is_list or not labels or not all(isinstance(each, str) and each.strip() for each in labels):
        raise InvalidArgumentError(f"labels: expected a list of texts, got {labels!r:.80}; such as ['cat', 'dog']")
    return list(labels)


def _check_share(name: str, value: float | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
        raise InvalidArgumentError(f"{name}: expected a number from 0 to 1, got {value!r}; correct it")
