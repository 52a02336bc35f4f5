"""``/v2``: the Open Inference Protocol of KServe and Triton, with JSON and binary tensors."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import ml_dtypes
import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve import __version__
from torchax_serve.server.body import parse_body, read_body, too_large
from torchax_serve.server.context import Stage, context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.inference_statistics import Times
from torchax_serve.server.media_inputs import results
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.notes import note_once
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.request_fields import ApiRequest, Objects, honoured

HEADER_LEN = "Inference-Header-Content-Length"
"""Header with the bytes of the JSON in front of binary tensors."""
DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
}
"""NumPy's type of each datatype; texts (BYTES) are inputs of no model here."""
_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
_RANKS = {"pixel_values": 4, "input_values": 2, "input_features": 3, "input_ids": 2, "past_values": 2}
"""Dimensions of a model's main input."""
MAX_RANK = 8
VERSION = "1"
"""Version of every model: a server has one of each."""
_SHARED = "shared memory"
_CODINGS = {"gzip": 31, "deflate": 15}
"""Compressions of bodies, and zlib's number for their heads."""
ROUTES = "/v2/"
"""Beginning of the paths whose errors have this protocol's form, without those of `_OTHERS`."""
_EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")
_OTHERS = ("/v2/embed", "/v2/rerank")


class InferRequest(ApiRequest):
    """Body of ``/v2/models/{model}/infer``; binary tensors follow the JSON."""

    routes: ClassVar[tuple[str, ...]] = (
        "/v2/models/{model:path}/infer",
        "/v2/models/{model:path}/versions/{version}/infer",
    )
    inputs: Annotated[Objects, honoured("`name`, `shape`, `datatype`, `data` or `parameters.binary_data_size`")]
    outputs: Annotated[Objects | None, honoured("`name`, `parameters.binary_data`; all outputs by default")] = None
    id: Annotated[str | None, honoured("returned with the answer")] = None
    parameters: Annotated[
        dict[str, Any] | None,
        honoured("`binary_data_output`; `timeout` in microseconds; `priority` changes nothing; others are refused"),
    ] = None


def error_content(error: ApiError) -> dict[str, Any]:
    """Returns the body of an error: ``{"error": "..."}``."""
    return {"error": error.message}


def is_for(path: str) -> bool:
    """Returns whether errors of a path have this form."""
    return path.startswith(ROUTES) and path not in _OTHERS


async def repository_index(request: Request) -> Response:
    """Lists the models with their versions, as Triton's index does."""
    context, key = context_of(request), request.state.key
    loaded = {name for service in context.loaded for name in service.names}
    names = [name for name in context.model_names if key is None or key.allows(name)]
    return JSONResponse(
        [{"name": each, "version": VERSION, "state": "READY" if each in loaded else "UNAVAILABLE"} for each in names]
    )


async def server_metadata(request: Request) -> Response:
    """Returns name, version and extensions of the server."""
    return JSONResponse({"name": "torchax-serve", "version": __version__, "extensions": list(_EXTENSIONS)})


async def live(request: Request) -> Response:
    """Returns whether the process is worth keeping."""
    is_live = context_of(request).stage is not Stage.DEAD
    return JSONResponse({"live": is_live}, 200 if is_live else 503)


async def ready(request: Request) -> Response:
    """Returns whether requests are answered."""
    is_ready = context_of(request).stage is Stage.READY
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


async def model_ready(request: Request) -> Response:
    """Returns whether a model answers requests."""
    service = await _service(request)
    return JSONResponse({"name": service.name, "ready": True})


async def model_metadata(request: Request) -> Response:
    """Returns the inputs of a model, and the outputs that its last request had."""
    service = await _service(request)
    model: Any = service.model
    rank = _RANKS.get(model.main_input, 2)
    kind = "INT64" if model.main_input == "input_ids" else "FP32"
    shape = [-1, 3, -1, -1] if model.main_input == "pixel_values" else [-1] * rank
    outputs = [
        {"name": name, "datatype": _NAMES[dtype], "shape": [-1] * ndim}
        for name, (dtype, ndim) in model.outputs_seen.items()
    ]
    inputs = [{"name": model.main_input, "datatype": kind, "shape": shape}]
    return JSONResponse(
        {"name": service.name, "versions": [VERSION], "platform": "jax_torchax", "inputs": inputs, "outputs": outputs}
    )


async def model_config(request: Request) -> Response:
    """Returns the inputs of a model in the form of Triton's configuration."""
    service = await _service(request)
    metadata = json.loads((await model_metadata(request)).body)
    parts = {
        kind: [
            {"name": each["name"], "data_type": f"TYPE_{each['datatype']}", "dims": each["shape"]}
            for each in metadata[f"{kind}s"]
        ]
        for kind in ("input", "output")
    }
    # A batch is a dimension of the tensors here, which Triton's 0 says.
    return JSONResponse({"name": service.name, "platform": metadata["platform"], "max_batch_size": 0, **parts})


async def infer(request: Request) -> Response:
    """Returns the outputs of a model's forward for tensors."""
    service, began_ns = await _service(request), time.monotonic_ns()
    try:
        content, head_len, times = await _inferred(request, service)
    except ApiError:
        service.inference.fail(time.monotonic_ns() - began_ns)
        raise
    service.inference.succeed(times)
    if head_len is None:
        return Response(content, media_type="application/json")
    return Response(content, media_type="application/octet-stream", headers={HEADER_LEN: str(head_len)})


async def _inferred(request: Request, service: ModelService) -> tuple[bytes, int | None, Times]:
    """Returns an answer's body, the bytes of its JSON if tensors follow, and its times."""
    limits = context_of(request).options
    data = await read_body(request, limits)
    read_ns = time.monotonic_ns()
    data = await service.run(_decompressed, request.headers.get("content-encoding"), data, limits)
    head, rest = _split(request, data)
    body = InferRequest.parse(parse_body(head, context_of(request).options))
    arrays = await service.run(_inputs, body.inputs, rest)
    parameters = body.parameters or {}
    if unknown := parameters.keys() - {"binary_data_output", "timeout", "priority"}:
        raise bad_request(
            f"parameters: expected binary_data_output, timeout or priority, got {min(unknown)[:60]}", "parameters"
        )
    if parameters.get("priority"):
        note_once("/v2: priority changes nothing; requests are computed as they come")
    timeout_us = parameters.get("timeout")
    if timeout_us is not None and (type(timeout_us) is not int or timeout_us < 0):
        message = f"parameters.timeout: expected microseconds, a whole number >= 0, got {str(timeout_us)[:40]}"
        raise bad_request(message, "parameters", "invalid_value")
    model: Any = service.model
    timeout_s = timeout_us / 1e6 if timeout_us else None  # 0 is none, as in Triton
    asked_ns = time.monotonic_ns()
    found, forward_ns = await results(request, model.atimed_infer, arrays, timeout_s=timeout_s)
    found_ns = time.monotonic_ns()
    is_binary = bool(parameters.get("binary_data_output", False))
    wanted = _wanted(body.outputs, found, is_binary)
    answer = {"model_name": service.name, "id": body.id} if body.id is not None else {"model_name": service.name}
    content, head_len = await service.run(_encoded, answer, {name: found[name] for name in wanted}, wanted)
    waited_ns = max(0, found_ns - asked_ns - forward_ns)
    return content, head_len, Times(asked_ns - read_ns, waited_ns, forward_ns, time.monotonic_ns() - found_ns)


async def statistics(request: Request) -> Response:
    """Returns counts and times of a model's requests; without its name, of all loaded ones."""
    if "model" in request.path_params:
        services = [await _service(request)]
    else:
        key = request.state.key
        services = [each for each in context_of(request).loaded if hasattr(type(each.model), "ainfer")]
        services = [each for each in services if key is None or any(map(key.allows, each.names))]
    return JSONResponse({"model_stats": [each.inference.shown(each.name, VERSION) for each in services]})


async def no_regions(request: Request) -> Response:
    """Returns the regions of shared memory that are registered: none."""
    return JSONResponse([])


async def unregister_regions(request: Request) -> Response:
    """Unregisters all regions of shared memory, of which there are none."""
    return JSONResponse({})


async def refuse_region(request: Request) -> Response:
    """Refuses a region of shared memory.

    Raises:
        ApiError: 400, always.
    """
    raise bad_request(
        f"{request.url.path}: expected tensors in the body of a request, got {_SHARED}, which this server does not "
        "read; send them as JSON or binary data"
    )


async def _service(request: Request) -> ModelService:
    """Returns the model in the path, which has heads for images or sound.

    Raises:
        ApiError: 404 if there is no such model or version, or it is one of texts.
    """
    context, name = context_of(request), request.path_params["model"]
    version = request.path_params.get("version", VERSION)
    service = context.only_service() or await context.take(request, name)
    service.check_name(name, request.state.key)
    if version != VERSION:
        raise ApiError(404, f"/v2/models: expected version {VERSION} of {name}, got {version[:40]}; leave it out")
    if not hasattr(type(service.model), "ainfer"):
        raise ApiError(
            404,
            f"/v2/models: expected a model with a head for images or sound, got {service.name}, whose tasks "
            f"are {', '.join(service.tasks)}",
        )
    return service


def _decompressed(coding: str | None, data: bytes, options: ServerOptions) -> bytes:
    """Returns the body as it was before its compression.

    Raises:
        ApiError: 415 for an unknown compression, 413 if the body is too long, 400 if it is damaged.
    """
    coding = (coding or "identity").lower()
    if coding == "identity":
        return data
    if coding not in _CODINGS:
        raise ApiError(415, f"expected Content-Encoding: {' or '.join(_CODINGS)}, or none, got {coding[:40]}")
    most = options.connection.max_body_bytes
    reader = zlib.decompressobj(_CODINGS[coding])
    try:
        found = reader.decompress(data, most + 1)
    except zlib.error as error:
        raise bad_request(f"expected a body in {coding}, got one that is damaged ({error})") from error
    if len(found) > most:
        raise too_large(most)
    if not reader.eof:
        raise bad_request(f"expected a body in {coding}, got one that is cut")
    return found


def _split(request: Request, data: bytes) -> tuple[bytes, bytes]:
    """Returns the JSON of a body, and the binary tensors behind it."""
    given = request.headers.get(HEADER_LEN)
    if given is None:
        return data, b""
    if not given.isdecimal() or len(given) > 10 or int(given) > len(data):
        raise bad_request(f"{HEADER_LEN}: expected a number of at most {len(data)} bytes, got {given[:40]!r}")
    return data[: int(given)], data[int(given) :]


def _inputs(given: Sequence[Mapping[str, Any]], rest: bytes) -> dict[str, np.ndarray]:
    """Returns the tensors of a request by name."""
    found: dict[str, np.ndarray] = {}
    for index, each in enumerate(given):
        where = f"inputs[{index}]"
        if unknown := each.keys() - {"name", "shape", "datatype", "data", "parameters"}:
            raise bad_request(f"{where}: expected no field {min(unknown)[:60]}", "inputs", "unknown_parameter")
        name, dtype = each.get("name"), DTYPES.get(str(each.get("datatype")))
        shape: Any = each.get("shape")
        if not isinstance(name, str) or name in found:
            raise bad_request(f"{where}.name: expected a name that no other input has", "inputs", "invalid_value")
        if dtype is None:
            raise bad_request(f"{where}.datatype: expected one of {', '.join(DTYPES)}", "inputs", "invalid_value")
        is_shape = isinstance(shape, list) and len(shape) <= MAX_RANK and all(type(n) is int and n > 0 for n in shape)
        if not is_shape:
            raise bad_request(f"{where}.shape: expected numbers above 0", "inputs", "invalid_value")
        parameters = each.get("parameters") or {}
        _check_parameters(parameters, {"binary_data_size"}, where, "inputs")
        num_bytes = parameters.get("binary_data_size")
        expected = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes is not None:
            if num_bytes != expected or len(rest) < expected:
                message = f"{where}: expected {expected} bytes of a tensor of this shape, got {num_bytes}"
                raise bad_request(message, "inputs", "invalid_value")
            found[name] = np.frombuffer(rest[:expected], dtype).reshape(shape)
            rest = rest[expected:]
            continue
        found[name] = _array(each.get("data"), shape, dtype, where)
    if rest:
        raise bad_request(f"inputs: expected no bytes behind the tensors, got {len(rest)}", "inputs", "invalid_value")
    return found


def _check_parameters(parameters: Mapping[str, Any], known: set[str], where: str, field: str) -> None:
    """Raises ApiError for parameters of a tensor that are not honoured."""
    if unknown := parameters.keys() - known:
        name = min(unknown)
        got = f"{name[:60]} ({_SHARED}, which this server does not read)" if name.startswith("shared") else name[:60]
        raise bad_request(f"{where}.parameters: expected {min(known)}, got {got}", field, "unsupported_parameter")


def _array(data: Any, shape: Sequence[int], dtype: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(data)
        if array.dtype.kind not in "biuf" or array.size != math.prod(shape):
            raise ValueError("another number of values")
        return array.astype(dtype).reshape(shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise bad_request(
            f"{where}.data: expected {math.prod(shape)} numbers, flat or nested, got something else",
            "inputs",
            "invalid_value",
        ) from error


def _wanted(asked: Sequence[Mapping[str, Any]] | None, found: Mapping[str, Any], is_binary: bool) -> dict[str, bool]:
    """Returns the names of outputs, and whether each is binary."""
    if not asked:
        return dict.fromkeys(found, is_binary)
    wanted: dict[str, bool] = {}
    for index, each in enumerate(asked):
        name: Any = each.get("name")
        if name not in found:
            raise bad_request(
                f"outputs[{index}].name: expected one of {', '.join(found)}, got {str(name)[:60]!r}",
                "outputs",
                "invalid_value",
            )
        parameters = each.get("parameters") or {}
        if unknown := each.keys() - {"name", "parameters"}:
            raise bad_request(f"outputs[{index}]: expected no field {min(unknown)[:60]}", "outputs")
        _check_parameters(parameters, {"binary_data"}, f"outputs[{index}]", "outputs")
        wanted[name] = bool(parameters.get("binary_data", is_binary))
    return wanted


def _encoded(
    answer: dict[str, Any], found: Mapping[str, np.ndarray], is_binary: Mapping[str, bool]
) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and the bytes of its JSON if tensors follow it."""
    outputs, tail = [], b""
    for name, array in found.items():
        entry: dict[str, Any] = {"name": name, "datatype": _NAMES[array.dtype], "shape": list(array.shape)}
        if is_binary[name]:
            data = np.ascontiguousarray(array).tobytes()
            entry["parameters"], tail = {"binary_data_size": len(data)}, tail + data
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            raise bad_request(f"outputs: expected finite numbers for JSON, {name} has others; ask for binary tensors")
        else:
            entry["data"] = array.reshape(-1).tolist()
        outputs.append(entry)
    head = json.dumps({**answer, "outputs": outputs}).encode()
    return head + tail, len(head) if any(is_binary.values()) else None
