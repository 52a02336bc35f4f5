"""Processors of models with inputs of images, videos or audio.

They turn conversations into arguments of ``generate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from torchax_serve.multimodal.audio import check_rate, checked_samples
from torchax_serve.multimodal.images import checked_image
from torchax_serve.multimodal.video import checked_frames, metadata_of
from torchax_serve.text.messages import media_parts

if TYPE_CHECKING:
    from torchax_serve.text.chat_template import ChatOptions


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


def _video_part_of(processor: Any) -> Any:
    return getattr(processor, "video_processor", None)


def media_inputs(model: Any, conversation: list[dict[str, Any]], options: ChatOptions | None = None) -> dict[str, Any]:
    """Returns the arguments of ``generate`` for a conversation with images, videos or audio.

    Args:
        model: what `torchax_serve.serve` returned.
        conversation: checked messages; a part ``{"type": "image", "image": …}`` of a content has a PIL image, a path
            or a URL, a part ``{"type": "audio", "audio": …}`` samples float[num_samples] with their
            ``"sampling_rate"``, a path or a URL, and a part ``{"type": "video", "video": …}`` frames with their
            ``"fps"``, as `torchax_serve.multimodal.video.checked_frames` takes them.
        options: further arguments of the template.

    Raises:
        ChatTemplateError, UnsupportedArgumentError: as `torchax_serve.text.chat_template.ChatTemplate.text`.
        InvalidArgumentError: an image that is empty, unreadable or has too many pixels; audio without samples, or at
            another rate than the model's.
        UnsupportedModelError: as `processor_of`, and for images with an audio model, or the other way around.
    """
    from model_adapters import quirks  # with PyTorch, which recorded models do without
    from torchax_serve.multimodal.decode_inputs import in_dtype

    processor = processor_of(model)
    for part in media_parts(conversation):
        _check_part(processor, part, model.name)
    if not getattr(processor, "chat_template", None):
        raise UnsupportedModelError(
            f"expected a processor with a chat template, that of {model.name} has none; set "
            "processor_of(model).chat_template, or write the prompt and call generate()"
        )
    typed = [_typed(message) for message in conversation]
    written = _written(processor, typed, model.name, options)
    videos: list[Any] = [part for part in media_parts(typed) if part["type"] == "video"]
    if videos:
        metadata = [metadata_of(part["video"], part.pop("fps", None)) for part in videos]
        written["processor_kwargs"] = {"video_metadata": metadata}
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
    return {**quirks.of(model.torch_model).media_options, **in_dtype(inputs, model.torch_model.dtype)}


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

    Text is a part, too, images have 8 bits, audio is float32, and videos are arrays.
    """
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = content if isinstance(content, (list, tuple)) else ()
    return {**message, "content": [_as_arrays(part) for part in parts]}


def _as_arrays(part: Any) -> Any:
    if isinstance(part, Mapping) and part.get("type") == "video":
        return {**part, "video": checked_frames(part.get("video"))}
    if isinstance(part, Mapping) and part.get("type") == "image" and part.get("image") is not None:
        return {**part, "image": checked_image(part["image"])}
    if not (isinstance(part, Mapping) and isinstance(part.get("audio"), np.ndarray)):
        return part
    others = {name: value for name, value in part.items() if name != "sampling_rate"}
    return {**others, "audio": checked_samples(part["audio"], "audio")}


def _check_part(processor: Any, part: Mapping[str, Any], name: str) -> None:
    kind = part["type"]
    find, plural = _PARTS[kind]
    owner = find(processor)
    if owner is None:
        raise UnsupportedModelError(
            f"expected a processor with a part for {plural}, got {type(processor).__name__} for {name}; leave them "
            f"out, or take a checkpoint of a model with {kind} inputs"
        )
    if kind == "video":
        return
    if kind == "image":
        if not any(part.get(source) is not None for source in ("image", "url", "path", "base64")):
            raise InvalidArgumentError(
                'image: expected a part like {"type": "image", "image": picture}, got one without an image'
            )
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


_PARTS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "image": (_image_part_of, "images"),
    "audio": (_audio_part_of, "audio"),
    "video": (_video_part_of, "videos"),
}
"""Kinds of parts: the function that finds what reads them in a processor, and their name for errors."""
