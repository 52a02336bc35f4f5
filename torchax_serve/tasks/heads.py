"""Which methods a model has: one table from transformers' mappings of heads to tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from transformers.models.auto import modeling_auto


@dataclasses.dataclass(frozen=True)
class Head:
    """What models of some classes can do.

    Attributes:
        method: Method of the served model.
        pipeline: Class of transformers' pipeline, which reads inputs and makes results; empty if it has none.
        mappings: Names of transformers' mappings that list the classes of models, without their common parts.
        readers: What of the checkpoint makes inputs, by the argument of the pipeline.
        takes_labels: Whether a call gives the labels, in place of the model's own.
        classes: Further classes of models.
    """

    method: str
    pipeline: str
    mappings: tuple[str, ...]
    readers: tuple[str, ...] = ()
    takes_labels: bool = False
    classes: tuple[str, ...] = ()

    @property
    def reads_texts(self) -> bool:
        """Whether a tokenizer makes inputs."""
        return self.takes_labels or self.method in ("speak", "transcribe")

    @property
    def class_names(self) -> frozenset[str]:
        """Classes of models that have this head."""
        return frozenset((*_names(self.mappings), *self.classes))


_IMAGES, _SOUND = ("image_processor",), ("feature_extractor",)

PROMPTED = ("SamModel", "SamHQModel", "Sam2Model", "Sam3TrackerModel", "EdgeTamModel")
"""Classes of models that find masks at points and in boxes."""

HEADS = (
    Head("classify_images", "ImageClassificationPipeline", ("IMAGE_CLASSIFICATION",), _IMAGES),
    Head("classify_images", "ZeroShotImageClassificationPipeline", ("ZERO_SHOT_IMAGE_CLASSIFICATION",), _IMAGES, True),
    Head("detect", "ObjectDetectionPipeline", ("OBJECT_DETECTION",), _IMAGES),
    Head("detect", "ZeroShotObjectDetectionPipeline", ("ZERO_SHOT_OBJECT_DETECTION",), _IMAGES, True),
    Head(
        "segment",
        "ImageSegmentationPipeline",
        ("IMAGE_SEGMENTATION", "SEMANTIC_SEGMENTATION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION"),
        _IMAGES,
    ),
    Head("depth", "DepthEstimationPipeline", ("DEPTH_ESTIMATION",), _IMAGES),
    Head("masks", "", (), ("image_processor",), classes=PROMPTED),
    Head("embed_images", "", ("IMAGE", "IMAGE_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION"), _IMAGES),
    Head("classify_audio", "AudioClassificationPipeline", ("AUDIO_CLASSIFICATION",), _SOUND),
    Head("transcribe", "AutomaticSpeechRecognitionPipeline", ("CTC",), _SOUND),
    Head("speak", "TextToAudioPipeline", ("TEXT_TO_WAVEFORM",)),
    Head("speak", "", (), classes=("SpeechT5ForTextToSpeech",)),
    Head("forecast", "", ("TIME_SERIES_PREDICTION",)),
)
"""All heads; a class may have several."""

OF_IMAGES = frozenset({"classify_images", "detect", "segment", "depth", "masks", "embed_images"})
OF_SOUND = frozenset({"classify_audio", "transcribe", "speak"})
OF_SERIES = frozenset({"forecast"})


def heads_of(class_name: str) -> tuple[Head, ...]:
    """Returns the heads of a class of models, in the order of the table."""
    return tuple(head for head in HEADS if class_name in head.class_names)


def methods_of(class_name: str) -> tuple[str, ...]:
    """Returns the methods that models of a class have for their heads."""
    return tuple(dict.fromkeys(head.method for head in heads_of(class_name)))


def _names(mappings: tuple[str, ...]) -> Iterator[str]:
    for name in mappings:
        for value in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}).values():
            yield from (value,) if isinstance(value, str) else value
