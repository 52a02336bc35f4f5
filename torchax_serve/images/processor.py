"""The processor of a model of images and text: a conversation and its images become the arguments of ``generate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError

MOST_PIXELS = 100_000_000
"""Of one image. Before it is made small it is turned into floating-point numbers: twelve bytes for each pixel."""


def processor_of(model: Any) -> Any:
    """The processor that lies beside the weights of `model`, what `torchax_serve.serve` returned.

    Call it as transformers has it: ``processor(text=…, images=…, return_tensors="pt")`` gives what ``generate`` takes.

    Raises:
        UnsupportedModelError: the folder has no processor, or one without a part for images.
        CheckpointError: the files are there and do not make a processor.
    """
    processor = model._open().processor()
    if processor is None:
        raise UnsupportedModelError(
            f"expected a processor beside the weights of {model.name} (preprocessor_config.json), found none; save it "
            "into the model's folder, or make the inputs yourself and call generate()"
        )
    if getattr(processor, "image_processor", None) is None:
        raise UnsupportedModelError(
            f"expected a processor with a part for images, got {type(processor).__name__} for {model.name}; leave the "
            "images out, or take a checkpoint of a model that sees them"
        )
    return processor


def has_images(messages: Any) -> bool:
    """Whether a message of a conversation has an image among its contents."""
    return not isinstance(messages, str) and next(_images(messages), None) is not None


def _images(messages: Any) -> Iterator[Mapping[str, Any]]:
    for message in messages if isinstance(messages, Sequence) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, (list, tuple)) else ()
        yield from (part for part in parts if isinstance(part, Mapping) and part.get("type") == "image")


def image_inputs(model: Any, conversation: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``generate`` takes for a conversation with images.

    Args:
        model: what `torchax_serve.serve` returned.
        conversation: messages; a part ``{"type": "image", "image": …}`` of a content has a PIL image, a path or a URL.

    Raises:
        InvalidArgumentError: an image that is empty, has too many pixels, or that nobody can read.
        UnsupportedModelError: as `processor_of`.
    """
    processor = processor_of(model)
    for part in _images(conversation):
        check_size(part.get("image"))
    if not getattr(processor, "chat_template", None):
        raise UnsupportedModelError(
            f"expected a processor with a chat template, that of {model.name} has none; set "
            "processor_of(model).chat_template, or write the prompt and call generate()"
        )
    try:
        inputs = processor.apply_chat_template(
            [_typed(message) for message in conversation],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    except Exception as error:  # files that are no images, templates that fail: libraries raise whatever they like
        said = " ".join(str(error).split())[:200]
        raise InvalidArgumentError(
            f"expected messages and images that the processor of {model.name} takes, it raised "
            f"{type(error).__name__}: {said}; check paths and contents"
        ) from error
    return dict(inputs)


def _typed(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose text is a part, as templates of such models want it."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def check_size(image: Any) -> None:
    """Raises InvalidArgumentError for an image that has no pixels, or too many; paths and URLs are not opened."""
    size = getattr(image, "size", None)
    if not isinstance(size, tuple) or len(size) != 2:
        return
    width, height = size
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise InvalidArgumentError(
            f"expected an image of 1 to {MOST_PIXELS:,} pixels, got {width}x{height}; make it smaller, models see "
            "a few thousand pixels a side at most"
        )
