"""Every field of the forms for transcripts with values that no client should send, as in `test_fields`."""

import os
import sys
from pathlib import Path

import httpx
import pytest
from running_server import serving
from test_fields_of_encoders import check_error
from thorough import thorough

sys.path.insert(0, str(Path(__file__).parents[1] / "seq2seq"))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from test_audio import file_of
from timed_whisper import noise, timed_whisper

from torchax_serve.server.audio import TranscriptionRequest
from torchax_serve.server.forms import MAX_FIELDS

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
AUDIO = file_of(noise(0.4, 1))
FORM = {"model": b"tiny", "language": b"en"}
VALUES = [
    b"", b"-1", b"0", b"1", b"2147483648", b"9223372036854775808", b"1" + b"0" * 400,
    b"1e308", b"1e-320", b"NaN", b"-Infinity", b"null", b"TRUE ", b"true", b"x", b"[]", b"{}", b'["word"]', b'{"a": 1}',
    b"y" * 60_000, b"y" * 1_000_000, b"\0", b"\xed\xa0\x80", b"\xff\xfe", "ą".encode(), b"a\r\nb", b"../../etc/passwd",
]  # fmt: skip


def form_of(fields, files=(("file", AUDIO),)):
    """Returns a form's type and body; fields are (name, bytes), which no client's library would check."""
    parts = [
        b'--boundary\r\nContent-Disposition: form-data; name="' + name.encode() + end + value + b"\r\n"
        for given, end in ((fields, b'"\r\n\r\n'), (files, b'"; filename="a.wav"\r\n\r\n'))
        for name, value in given
    ]
    return {"Content-Type": "multipart/form-data; boundary=boundary"}, b"".join(parts) + b"--boundary--\r\n"


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    path = tmp_path_factory.mktemp("audio fields")
    timed_whisper(path)
    with serving(path) as (server, model), httpx.Client(base_url=server.url, timeout=300) as http:
        yield http, model


def send(http, path, *form):
    headers, body = form_of(*form)
    response = http.post(path, content=body, headers=headers)
    check_error(response)
    return response


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", thorough("/v1/audio/translations")])
def test_every_form_field_with_hostile_values(speech, path):
    http, model = speech
    known = send(http, path, FORM.items()).json()
    stride = 1 if os.environ.get("TORCHAX_SERVE_ALL_VALUES") else 9
    for number, field in enumerate(TranscriptionRequest.model_fields):
        for value in VALUES[number % stride :: stride]:
            if field != "file":
                send(http, path, (FORM | {field: value}).items())
                send(http, path, [*FORM.items(), (f"{field}[]", value), (f"{field}[]", value)])
            assert send(http, path, FORM.items(), [(field, value)]).status_code == 400  # a file that is no audio
    assert send(http, path, FORM.items()).json() == known
    scheduler = model.stats().scheduler
    assert not scheduler.num_running and not scheduler.num_waiting


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_forms_with_parts_that_no_client_sends(speech, path):
    http, _ = speech
    two_files = [("file", AUDIO), ("file", AUDIO)]
    bad = [
        (FORM.items(), two_files),
        ([*FORM.items(), ("file", b"text")], ()),
        (FORM.items(), ()),
    ]
    bad += [([(name, b"x")] * (MAX_FIELDS + 1),) for name in ("model", "timestamp_granularities[]", "x" * 5000, "")]
    for form in bad:
        answer = send(http, path, *form)
        assert answer.status_code == 400, (form, answer.text)
        assert answer.json()["error"]["param"] in (None, "file", "model"), answer.text
    again = send(http, path, [*FORM.items(), *[("response_format", form) for form in (b"text", b"json")]])
    assert again.status_code == 200 and again.json().keys() == {"text", "usage"}  # the last one counts, as in forms
