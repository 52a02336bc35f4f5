"""Reads forms (``multipart/form-data``) with one file, which stays in memory."""

from __future__ import annotations

import asyncio

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.options import ConnectionLimits

FORM = "multipart/form-data"
MAX_FIELDS = 32
MAX_FIELD_BYTES = 65536


def is_form(request: Request) -> bool:
    """Returns whether the header of a request says that its body is a form."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == FORM


async def read_form(
    request: Request, limits: ConnectionLimits, file_field: str
) -> tuple[list[tuple[str, str]], bytes | None]:
    """Returns the fields of a form in their order, and the bytes of its file if there is one.

    Args:
        request: The request.
        limits: Of its body.
        file_field: Name of the field with the file.

    Raises:
        ApiError: 415 for another type, 408, or 400 for what is no form or has a file in another field.
        ClientDisconnect: The client has gone.
    """
    if not is_form(request):
        raise ApiError(415, f"expected the header Content-Type: {FORM}, got another")
    parser = MultiPartParser(
        request.headers, request.stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
    )
    parser.spool_max_size = limits.max_body_bytes  # in memory: nothing is written to disk
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            form = await parser.parse()
    except TimeoutError as error:
        raise ApiError(408, f"expected the body within {limits.body_timeout_s:g} s; send it at once") from error
    except (MultiPartException, KeyError, ValueError) as error:
        raise bad_request(f"expected a form of {FORM} with a file, got something else") from error
    data: bytes | None = None
    fields: list[tuple[str, str]] = []
    try:
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile):
                fields.append((name, value))
                continue
            if name != file_field:
                message = f"expected the file as field {file_field}, got {name[:60]!r}"
                raise bad_request(message, file_field, "invalid_value")
            data = await value.read()
    finally:
        await form.close()
    return fields, data
