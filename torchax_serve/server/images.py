"""``/v1/images/generations``: images of prompts, by a pipeline of diffusers."""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model_adapters.errors import InvalidArgumentError, UnsafeImageError
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import bad_request
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.request_checks import check_text_size
from torchax_serve.server.request_fields import ApiRequest, ModelName, honoured, no_effect, refused
from torchax_serve.server.sse import until_disconnect

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 10
"""Most images of a request, as in OpenAI's interface."""
MAX_SIDE = 4096
"""Largest width and height, in pixels."""
MAX_STEPS = 1000
"""Most denoising steps: noise has no more levels."""
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


class ImageGenerationRequest(ApiRequest):
    """Body of ``/v1/images/generations``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/images/generations",)
    model: Annotated[ModelName, honoured("a name in `/v1/models`, another one is 404; without it, the served one")] = ""
    prompt: Annotated[str, honoured("what to draw")]
    n: Annotated[int | None, honoured(f"images, 1 to {MAX_IMAGES}; image i has the seed `seed + i`")] = None
    size: Annotated[
        str | None, honoured("`WIDTHxHEIGHT` in pixels, one that the pipeline can make; `auto`: the pipeline's own")
    ] = None
    response_format: Annotated[
        Literal["b64_json", "url"] | None,
        honoured("`b64_json` by default; `url` is one with the image in it (`data:`), as none is stored"),
    ] = None
    output_format: Annotated[Literal["png", "jpeg", "webp"] | None, honoured("`png` by default")] = None
    output_compression: Annotated[int | None, honoured("quality of `jpeg` and `webp`, 0 to 100; 100 by default")] = None
    seed: Annotated[int | None, honoured("of the noise; a new one by default")] = None
    negative_prompt: Annotated[str | None, honoured("what not to draw, where the pipeline takes one")] = None
    num_inference_steps: Annotated[
        int | None, honoured(f"denoising steps, at most {MAX_STEPS}; the pipeline's default without it")
    ] = None
    guidance_scale: Annotated[float | None, honoured("weight of the prompt; the pipeline's default without it")] = None
    quality: Annotated[Any, refused("expected auto; write num_inference_steps", "auto", "standard")] = None
    style: Annotated[Any, refused("expected null; write it into the prompt", "auto")] = None
    background: Annotated[Any, refused("expected auto; images are opaque", "auto", "opaque")] = None
    moderation: Annotated[Any, refused("expected auto; a pipeline has its own checker or none", "auto", "low")] = None
    stream: Annotated[Any, refused("expected false; the answer is sent when it is complete", False)] = None
    partial_images: Annotated[Any, refused("expected 0; the answer is sent when it is complete", 0)] = None
    user: Annotated[str | None, no_effect("who asks is told by the API key")] = None


async def generations(request: Request) -> Response:
    """Returns images of a prompt."""
    service, body = await read_for_model(request, ImageGenerationRequest, "generate_image")
    service.settle_name(body, request.state.key)
    limits = context_of(request).options
    for field, text in (("prompt", body.prompt), ("negative_prompt", body.negative_prompt or "")):
        check_text_size(text, limits.request, field)
    options = _options(body)
    model: Any = service.model
    work = model.agenerate_image(
        [body.prompt] * (body.n or 1),
        timeout_s=limits.request_timeout_s,
        queue_timeout_s=limits.queue_timeout_s,
        **options,
    )
    try:
        images = await until_disconnect(request.receive, work)
    except UnsafeImageError as error:
        raise bad_request(f"prompt: {error}", "prompt", "content_policy_violation") from error
    except InvalidArgumentError as error:
        side, _, rest = str(error).partition(": ")
        if side not in ("width", "height"):
            raise
        raise bad_request(f"size: {side}: {rest}", "size", "invalid_value") from error
    form = body.output_format or "png"
    quality = 100 if body.output_compression is None else body.output_compression
    found = await service.run(_encoded, images, form, quality)
    kind = body.response_format or "b64_json"
    head = f"data:image/{form};base64," if kind == "url" else ""
    return JSONResponse(
        {
            "created": int(time.time()),
            "data": [{kind: head + each} for each in found],
            "background": "opaque",
            "output_format": form,
            "size": f"{images[0].width}x{images[0].height}",
        }
    )


def _options(body: ImageGenerationRequest) -> dict[str, Any]:
    """Returns the options of the model's call.

    Raises:
        ApiError: 400 for a value that no pipeline takes.
    """
    bounds: tuple[tuple[str, Any, int, float], ...] = (
        ("n", body.n, 1, MAX_IMAGES),
        ("num_inference_steps", body.num_inference_steps, 1, MAX_STEPS),
        ("output_compression", body.output_compression, 0, 100),
        ("guidance_scale", body.guidance_scale, 0, 1000),
    )
    for field, value, least, most in bounds:
        if value is not None and not least <= value <= most:
            raise bad_request(f"{field}: expected a number from {least} to {most}, got {value}", field, "invalid_value")
    if body.output_compression not in (None, 100) and body.output_format in (None, "png"):
        message = "output_compression: expected output_format jpeg or webp with it, got png, which loses nothing"
        raise bad_request(message, "output_compression", "invalid_value")
    if not body.prompt.strip():
        raise bad_request("prompt: expected a text, got an empty one; say what to draw", "prompt", "invalid_value")
    found: dict[str, Any] = {"seed": body.seed}
    if body.size not in (None, "auto"):
        size = _SIZE.fullmatch(body.size or "")
        sides = [] if size is None else [int(each) for each in size.groups()]
        if not sides or max(sides) > MAX_SIDE:
            raise bad_request(
                f"size: expected auto or WIDTHxHEIGHT of at most {MAX_SIDE} pixels, got {str(body.size)[:40]!r}",
                "size",
                "invalid_value",
            )
        found["width"], found["height"] = sides
    for name in ("negative_prompt", "num_inference_steps", "guidance_scale"):
        if (value := getattr(body, name)) is not None:
            found[name] = value
    return found


def _encoded(images: Sequence[Image], form: str, quality: int) -> list[str]:
    """Returns files of images in base64."""
    found = []
    for image in images:
        file = io.BytesIO()
        options = {} if form == "png" else {"quality": quality}
        image.convert("RGB").save(file, form.upper(), **options)
        found.append(base64.b64encode(file.getvalue()).decode())
    return found
