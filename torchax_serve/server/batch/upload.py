"""Reads a form with a file, whose content goes to the disk as it comes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar, Literal

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from torchax_serve.server.batch.files import FileStore, StoredFile, Upload
from torchax_serve.server.body import check_scalars
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.options import ConnectionLimits
from torchax_serve.server.request_fields import ApiRequest, honoured

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_NAME_CHARS = 255
BLOCK_BYTES = 1 << 20
"""Bytes of a file that are written at once, in a thread."""
_EXPIRES = {"expires_after[anchor]": "anchor", "expires_after[seconds]": "seconds"}


class FileRequest(ApiRequest):
    """Fields of ``POST /v1/files``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/files",)
    file: Annotated[Any, honoured("a request a line, as files of batches have them")] = None
    purpose: Annotated[Literal["batch"], honoured("`batch`")]
    expires_after: Annotated[
        dict[str, Any] | None,
        honoured("`anchor`: `created_at`; `seconds` after which it is dropped, at most `--stored-file-ttl`"),
    ] = None

    def max_age_s(self, most: float) -> float | None:
        """Returns the seconds for which the file is stored; None for the longest time."""
        return None if self.expires_after is None else checked_age(self.expires_after, "expires_after", most)


def checked_age(given: dict[str, Any], field: str, most: float) -> int:
    """Returns the seconds of an object with `anchor` and them; raises ApiError, 400."""
    text = str(given.get("seconds"))
    seconds = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
    if set(given) != {"anchor", "seconds"} or given["anchor"] != "created_at" or not 0 < seconds <= most:
        message = f"{field}: expected anchor created_at and seconds from 1 to {most:g}, got another"
        raise bad_request(message, field, "invalid_value")
    return seconds


async def read_upload(request: Request, store: FileStore, owner: str, limits: ConnectionLimits) -> StoredFile:
    """Returns the file of a form, stored.

    Raises:
        ApiError: 415, 413, 408 or 400 for another body; 400 if its owner has no room, 503 if the disk has none.
        ClientDisconnect: The client has gone, and nothing of it is left.
    """
    kind, parameters = parse_options_header(request.headers.get("content-type", ""))
    if kind.lower() != b"multipart/form-data" or not parameters.get(b"boundary"):
        raise ApiError(415, "expected the header Content-Type: multipart/form-data, got another")
    upload = await asyncio.to_thread(store.begin, owner)
    try:
        form = _Form(parameters[b"boundary"])
        timeout_s = limits.upload_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await _read_parts(request, form, upload)
        except TimeoutError as error:
            raise ApiError(408, f"expected the body within {timeout_s:g} s; send it at once") from error
        fields = form.fields()
        check_scalars(fields)
        body = FileRequest.parse(fields)
        if form.filename is None:
            raise bad_request("file: expected a file, got none", "file", "missing_required_parameter")
        age_s = body.max_age_s(store.limits.max_age_s)
        return await asyncio.to_thread(upload.finish, form.filename, body.purpose, age_s)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(upload.abandon))
        raise


async def _read_parts(request: Request, form: _Form, upload: Upload) -> None:
    try:
        async for part in request.stream():
            form.feed(part)
            if len(form.pending) >= BLOCK_BYTES:
                await asyncio.to_thread(upload.write, form.taken())
    except FormParserError as error:
        raise _no_form() from error
    if not form.is_complete:
        raise _no_form()
    await asyncio.to_thread(upload.write, form.taken())


class _Form:
    """A form that comes in pieces, with the content of its file apart.

    Attributes:
        pending: Content of the file that has not been taken.
        filename: Its name; None while there is none.
        is_complete: Whether the end of the form has come.
    """

    def __init__(self, boundary: bytes) -> None:
        self.pending = bytearray()
        self.filename: str | None = None
        self.is_complete = False
        self._fields: dict[str, bytearray] = {}
        self._header = [b"", b""]
        self._disposition = b""
        self._value: bytearray | None = None  # of the part that comes
        names = ("part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data", "end")
        callbacks: Any = {f"on_{name}": getattr(self, f"_{name}") for name in names}
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, data: bytes) -> None:
        """Takes a piece; raises FormParserError or ApiError for what is none."""
        self._parser.write(data)

    def taken(self) -> bytes:
        """Returns the content that has come since the last call."""
        found = bytes(self.pending)
        self.pending.clear()
        return found

    def fields(self) -> dict[str, Any]:
        """Returns the fields besides the file; raises ApiError, 400, for one that is no text."""
        found: dict[str, Any] = {}
        for name, value in self._fields.items():
            try:
                text = value.decode()
            except UnicodeDecodeError as error:
                raise bad_request(f"{name}: expected text in UTF-8, got other bytes", name, "invalid_value") from error
            if name in _EXPIRES:
                found.setdefault("expires_after", {})[_EXPIRES[name]] = text
            else:
                found[name] = text
        return found

    def _part_begin(self) -> None:
        self._header, self._disposition, self._value = [b"", b""], b"", None

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = [b"", b""]

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")[:100]
        if name == "file":
            if self.filename is not None or b"filename" not in options:
                raise bad_request("file: expected one file with a name, got several or none", "file", "invalid_value")
            self.filename = options[b"filename"].decode("utf-8", "replace")[:MAX_NAME_CHARS]
            self._value = self.pending
        elif not name or name in self._fields or len(self._fields) >= MAX_FIELDS:
            raise _no_form()
        else:
            self._value = self._fields[name] = bytearray()

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        assert self._value is not None
        self._value += data[start:end]
        if self._value is not self.pending and len(self._value) > MAX_FIELD_BYTES:
            raise bad_request(f"expected fields of at most {MAX_FIELD_BYTES} bytes besides the file, got a longer one")

    def _end(self) -> None:
        self.is_complete = True


def _no_form() -> ApiError:
    return bad_request("expected a form of multipart/form-data with a file, got something else")
