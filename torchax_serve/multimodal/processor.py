"""Processors of models with image or audio inputs.

They turn conversations into arguments of ``generate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from torchax_serve.multimodal.audio import check_rate, checked_samples

if TYPE_CHECKING:
    from torchax_serve.text.chat_template import ChatOptions

MOST_PIXELS = 100_000_000
"""Most pixels of one image; it is converted to floats before it is resized, 12 bytes per pixel."""


def processor_of(model: Any) -> Any:
    """Returns the checkpoint's processor of a served model.

    As in transformers, ``processor(text=…, images=…, return_tensors="pt")`` returns arguments of ``generate``.

    Raises:
        UnsupportedModelError: the folder has no processor, or one without a part for images.
        CheckpointError: the processor's files are broken.
    """
    processor = model._processor()
    if processor is None:
        raise UnsupportedModelError(
            f"expected a processor next to the weights of {model.name} (preprocessor_config.json), found none; save it "
            "into the model's folder, or make the inputs yourself and call generate()"
        )
    if _image_part_of(processor) is None and _audio_part_of(processor) is None:
        raise UnsupportedModelError(
            f"expected a processor with a part for images or audio, got {type(processor).__name__} for {model.name}; "
            "leave them out, or take a checkpoint of a model with such inputs"
        )
    return processor


def _image_part_of(processor: Any) -> Any:
    return getattr(processor, "image_processor", None)


def _audio_part_of(processor: Any) -> Any:
    return getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)


def has_media(messages: Any) -> bool:
    """Returns whether a message of a conversation has an image or audio."""
    return not isinstance(messages, str) and next(_parts(messages), None) is not None


def _parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the image and audio parts of a conversation."""
    for message in messages if isinstance(messages, Sequence) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, (list, tuple)) else ()
        yield from (part for part in parts if isinstance(part, Mapping) and part.get("type") in ("image", "audio"))


def media_inputs(model: Any, conversation: list[dict[str, Any]], options: ChatOptions | None = None) -> dict[str, Any]:
    """Returns the arguments of ``generate`` for a conversation with images or audio.

    Args:
        model: what `torchax_serve.serve` returned.
        conversation: checked messages; a part ``{"type": "image", "image": …}`` of a content has a PIL image, a path
            or a URL, and a part ``{"type": "audio", "audio": …}`` samples float[num_samples] with their
            ``"sampling_rate"``, a path or a URL.
        options: further arguments of the template.

    Raises:
        ChatTemplateError, UnsupportedArgumentError: as `torchax_serve.text.chat_template.ChatTemplate.text`.
        InvalidArgumentError: an image that is empty, unreadable or has too many pixels; audio without samples, or at
            another rate than the model's.
        UnsupportedModelError: as `processor_of`, and for images with an audio model, or the other way around.
    """
    processor = processor_of(model)
    for part in _parts(conversation):
        _check_part(processor, part, model.name)
    if not getattr(processor, "chat_template", None):
        raise UnsupportedModelError(
            f"expected a processor with a chat template, that of {model.name} has none; set "
            "processor_of(model).chat_template, or write the prompt and call generate()"
        )
    typed = [_typed(message) for message in conversation]
    written = _written(processor, typed, model.name, options)
    try:
        inputs = processor.apply_chat_template(
            typed, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **written
        )
    except Exception as error:  # files that are no images, templates that fail: libraries raise whatever they like
        message = " ".join(str(error).split())[:200]
        raise InvalidArgumentError(
            f"expected messages, images and audio that the processor of {model.name} takes, it raised "
            f"{type(error).__name__}: {message}; check paths and contents"
        ) from error
    return dict(inputs)


def _written(
    processor: Any, conversation: list[dict[str, Any]], name: str, options: ChatOptions | None
) -> dict[str, Any]:
    """Returns arguments that make the processor use the text of the template.

    The template is rendered with a deadline.
    """
    from transformers import ProcessorMixin

    from torchax_serve.text.chat_template import ChatOptions, ChatTemplate

    options = options or ChatOptions()
    if type(processor).apply_chat_template is not ProcessorMixin.apply_chat_template:
        if options != ChatOptions():
            raise UnsupportedArgumentError(
                "tools, documents, chat_template_kwargs, continue_final_message: expected none for "
                f"{type(processor).__name__}, which has its own way to write prompts; leave them out"
            )
        return {}
    source = processor.chat_template
    source = source.get("default", next(iter(source.values()))) if isinstance(source, dict) else source
    remedy = "check the roles and contents of the messages, or set processor_of(model).chat_template"
    template = ChatTemplate(source, name, processor.tokenizer.special_tokens_map, remedy)
    text = template.text(conversation, options)
    return {"chat_template": "{{ rendered_conversation }}", "rendered_conversation": text}


def _typed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message in the form of processor templates.

    Text is a part, too, and audio is float32.
    """
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = content if isinstance(content, (list, tuple)) else ()
    return {**message, "content": [_as_float32(part) for part in parts]}


def _as_float32(part: Any) -> Any:
    if not (isinstance(part, Mapping) and isinstance(part.get("audio"), np.ndarray)):
        return part
    others = {name: value for name, value in part.items() if name != "sampling_rate"}
    return {**others, "audio": checked_samples(part["audio"], "audio")}


def _check_part(processor: Any, part: Mapping[str, Any], name: str) -> None:
    kind = part["type"]
    owner = _image_part_of(processor) if kind == "image" else _audio_part_of(processor)
    if owner is None:
        raise UnsupportedModelError(
            f"expected a processor with a part for {'images' if kind == 'image' else 'audio'}, got "
            f"{type(processor).__name__} for {name}; leave them out, or take a checkpoint of a model with "
            f"{'image' if kind == 'image' else 'audio'} inputs"
        )
    if kind == "image":
        if not any(part.get(source) is not None for source in ("image", "url", "path", "base64")):
            raise InvalidArgumentError(
                'image: expected a part like {"type": "image", "image": picture}, got one without an image'
            )
        check_size(part.get("image"))
        return
    audio = part.get("audio")
    if audio is None and not any(part.get(other) for other in ("url", "path")):
        raise InvalidArgumentError(
            'audio: expected a part like {"type": "audio", "audio": samples, "sampling_rate": 16000}, got one without '
            "audio"
        )
    if audio is not None and not isinstance(audio, str):
        checked_samples(audio, "audio")
        check_rate(getattr(owner, "sampling_rate", None), part.get("sampling_rate"))


def check_size(image: Any) -> None:
    """Raises InvalidArgumentError for an image with no pixels or too many.

    Paths and URLs are not opened.
    """
    size = getattr(image, "size", None)
    if not isinstance(size, tuple) or len(size) != 2:
        return
    width, height = size
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise InvalidArgumentError(
            f"expected an image of 1 to {MOST_PIXELS:,} pixels, got {width}x{height}; make it smaller, models see "
            "a few thousand pixels a side at most"
        )
