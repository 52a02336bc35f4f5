"""``/v1/images/segmentations``: masks of objects, by prompts or by the model's labels."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve.server.body import check_scalars, read_request
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.forms import is_form, read_form
from torchax_serve.server.media_inputs import files_of, results
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.request_fields import FAIL_FAST, ApiRequest, ModelName, honoured, no_effect, refused
from torchax_serve.validation.bounded_json import parse_json

MAX_PROMPTS = 64
"""Most points, and most boxes, of a request: each number of them is a shape, which is compiled."""
_TEXTS = frozenset({"model", "image", "image_id", "mask_format", "subtask", "prompt", "user"})
"""Fields of a form that are texts; the others are JSON."""
_OF_PROMPTS = ("image_id", "points", "labels", "boxes", "multimask_output")
_OF_LABELS = ("subtask", "threshold", "mask_threshold", "overlap_mask_area_threshold")
"""Fields for a model that finds masks of prompts, and for one that segments by its labels."""
_Numbers = Annotated[list[Annotated[list[float], FAIL_FAST]], FAIL_FAST]


class SegmentationRequest(ApiRequest):
    """Body of ``/v1/images/segmentations``: JSON, or a form with the file ``image``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/images/segmentations",)
    model: Annotated[ModelName, honoured("a name in `/v1/models`, another one is 404; without it, the served one")] = ""
    image: Annotated[
        str | dict[str, Any] | None,
        honoured("a data URL, a file in base64, or a part with it as in chats; in a form the file"),
    ] = None
    image_id: Annotated[
        str | None,
        honoured("of an earlier answer, in place of `image`: one of the last 8 images, which is not encoded again"),
    ] = None
    points: Annotated[_Numbers | None, honoured(f"`[x, y]` in pixels, up to {MAX_PROMPTS}, all of one object")] = None
    labels: Annotated[
        Annotated[list[int], FAIL_FAST] | None,
        honoured("of each point: 1 is inside of the object, 0 outside; without it all are inside"),
    ] = None
    boxes: Annotated[
        _Numbers | None,
        honoured(
            f"`[left, top, right, bottom]` in pixels, up to {MAX_PROMPTS}, each of an object; one only with points"
        ),
    ] = None
    multimask_output: Annotated[
        bool | None, honoured("three masks of each object, by default; false: one, for prompts that leave no doubt")
    ] = None
    subtask: Annotated[
        Literal["semantic", "instance", "panoptic"] | None,
        honoured("what parts are, of models with labels; the last of these that the model has by default"),
    ] = None
    threshold: Annotated[float | None, honoured("least score of a part, 0 to 1, of models with labels")] = None
    mask_threshold: Annotated[float | None, honoured("least value of a mask's pixels, of models with labels")] = None
    overlap_mask_area_threshold: Annotated[
        float | None, honoured("least share of a part's pixels that no other part takes, of models with labels")
    ] = None
    mask_format: Annotated[
        Literal["png", "rle"] | None,
        honoured("`png`, by default: a file in base64, 255 inside; `rle`: COCO's run lengths, `size` and `counts`"),
    ] = None
    prompt: Annotated[Any, refused("expected none; objects are said by points and boxes", "")] = None
    box_labels: Annotated[Any, refused("expected none; each box is of an object", [])] = None
    user: Annotated[str | None, no_effect("who asks is told by the API key")] = None


async def segmentations(request: Request) -> Response:
    """Returns masks of objects in an image, at points and in boxes or by labels."""
    service, body = await read_for_model(request, SegmentationRequest, ("masks", "segment"), read=_read)
    service.settle_name(body, request.state.key)
    has_labels = "segment" in service.tasks
    _check_fields(service, body, has_labels=has_labels)
    answer: dict[str, Any] = {"created": int(time.time()), "model": body.model}
    if has_labels:
        image = await _image(request, service, body.image)
        options = {name: getattr(body, name) for name in _OF_LABELS}
        parts = await results(request, service.model.asegment, image, field="image", **options)
        found = [{"label": part.label, "score": part.score, "mask": part.mask} for part in parts]
    else:
        answer["image_id"], objects = await _prompted(request, service, body)
        found = [
            {"object": index, "score": each.score, "mask": each.mask}
            for index, masks in enumerate(objects)
            for each in masks
        ]
    data = await service.run(_encoded, found, body.mask_format or "png")
    return JSONResponse(answer | {"data": data})


async def _read(request: Request, options: ServerOptions, kind: type[SegmentationRequest]) -> SegmentationRequest:
    """Returns the body of a request, in JSON or as a form."""
    if not is_form(request):
        return await read_request(request, options, kind)
    given, data = await read_form(request, options.connection, "image")
    fields = {name: value if name in _TEXTS else _parsed(name, value, options) for name, value in given}
    check_scalars(fields)
    if data is not None:
        fields["image"] = base64.b64encode(data).decode()
    return kind.parse(fields)


def _parsed(name: str, text: str, options: ServerOptions) -> Any:
    """Returns the value of a form's field, which is JSON."""
    try:
        return parse_json(text.encode(), max_bytes=len(text.encode()), max_depth=options.request.max_json_depth)
    except ValueError as error:
        raise bad_request(f"{name[:60]}: expected JSON, got {text[:60]!r}", name[:60], "invalid_value") from error


def _check_fields(service: ModelService, body: SegmentationRequest, *, has_labels: bool) -> None:
    """Raises ApiError, 400, for fields of the other kind of model, and too many or no prompts."""
    kind = "finds parts by its labels" if has_labels else "finds masks at points and in boxes"
    for name in _OF_PROMPTS if has_labels else _OF_LABELS:
        if getattr(body, name) is not None:
            message = f"{name}: expected none for {service.name}, which {kind}, got a value"
            raise bad_request(message, name, "unsupported_parameter")
    for name in ("points", "boxes"):
        if (given := getattr(body, name)) is not None and len(given) > MAX_PROMPTS:
            message = f"{name}: expected at most {MAX_PROMPTS}, got {len(given)}; ask in several requests"
            raise bad_request(message, name, "invalid_value")
    if not has_labels and body.points is None and body.boxes is None:
        message = f"points: expected points or boxes for {service.name}, got none"
        raise bad_request(message, "points", "missing_required_parameter")
    if (body.image is None) == (body.image_id is None):
        got = "none" if body.image is None else "image and image_id"
        expected = "an image" if has_labels else "one of image and image_id"
        raise bad_request(f"image: expected {expected}, got {got}", "image", "missing_required_parameter")


async def _prompted(
    request: Request, service: ModelService, body: SegmentationRequest
) -> tuple[str, Sequence[Sequence[Any]]]:
    """Returns the name of the image, and the masks of each object."""
    model: Any = service.model
    options: dict[str, Any] = {name: getattr(body, name) for name in ("points", "labels", "boxes")}
    options["multimask_output"] = body.multimask_output is not False
    if body.image_id is not None:
        found = await results(request, model.amasks, None, field="image", image_id=body.image_id, **options)
        return body.image_id, found
    image = await _image(request, service, body.image)
    image_id = await service.run(model.image_id, image)
    return image_id, await results(request, model.amasks, image, field="image", **options)


async def _image(request: Request, service: ModelService, given: Any) -> Any:
    """Returns the image of a request as a PIL image."""
    if isinstance(given, str):
        is_address = given.startswith(("data:", "http://", "https://"))
        given = {"type": "image_url", "image_url": {"url": given}} if is_address else {"multimodal_data": [given]}
    try:
        (image,) = await files_of(request, service, given, "image", "image")
    except ApiError as error:
        raise bad_request(error.message.replace("image[0]", "image"), "image", error.code) from error
    return image


def _encoded(found: Sequence[Mapping[str, Any]], form: str) -> list[dict[str, Any]]:
    """Returns parts with their masks as texts, and the box of each."""
    from torchax_serve.tasks.results import box_of  # imports torch, which a recorded start needs not

    made = []
    for part in found:
        box = box_of(part["mask"])
        corners = None if box is None else [box.xmin, box.ymin, box.xmax, box.ymax]
        mask = png_of(part["mask"]) if form == "png" else run_lengths(part["mask"])
        made.append({**part, "box": corners, "mask": mask})
    return made


def png_of(mask: np.ndarray) -> str:
    """Returns a mask bool[height, width] as a grey PNG in base64, 255 inside."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8) * 255).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """Returns a mask bool[height, width] as COCO's compressed run lengths.

    They go down the columns, and begin with that of zeros. From the third on a run is written as its difference to the
    one two before it, in groups of five bits, lowest first, each a character; the sixth bit says that another follows.
    """
    flat = mask.ravel(order="F")
    bounds = np.concatenate(([0], np.flatnonzero(flat[1:] != flat[:-1]) + 1, [flat.size]))
    counts = np.diff(bounds)
    counts = np.concatenate(([0], counts)) if flat[0] else counts
    rest = counts.astype(np.int64)
    rest[3:] -= counts[1:-2]
    goes_on = np.ones(len(rest), bool)
    columns, are_written = [], []
    while goes_on.any():
        are_written.append(goes_on)
        bits = rest & 31
        rest = rest >> 5
        goes_on = goes_on & np.where(bits & 16, rest != -1, rest != 0)
        columns.append(bits + 32 * goes_on + 48)
    text = np.stack(columns, 1)[np.stack(are_written, 1)].astype(np.uint8).tobytes().decode("ascii")
    return {"size": list(mask.shape), "counts": text}
