"""What a server opens besides its own socket: nothing, whatever requests say."""

import json
import os
import socket
import sys

import httpx
import psutil
import pytest
from test_fields import BASES, FIELDS

FILES = ("open", "os.listdir", "os.scandir")
ADDRESSES = ("socket.connect", "socket.bind")
PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "urllib.Request")
EVENTS = frozenset({*FILES, *ADDRESSES, *PROCESSES, "socket.getaddrinfo"})


class Watch:
    """The files and addresses that Python opens in this process, while it is on; audit hooks cannot be removed."""

    def __init__(self):
        self.is_on = False
        self.seen = []
        sys.addaudithook(self._take)

    def _take(self, name, arguments):
        if self.is_on and name in EVENTS:
            self.seen.append((name, arguments))

    def __enter__(self):
        self.seen, self.is_on = [], True
        return self

    def __exit__(self, *error):
        self.is_on = False


@pytest.fixture(scope="module")
def watch():
    return Watch()


@pytest.fixture
def trap():
    """A socket that nobody should connect to."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.settimeout(0.05)
        yield found


def is_untouched(trap):
    try:
        trap.accept()
    except TimeoutError:
        return True
    return False


def media(url):
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "file", "file": {"file_id": url}},
    ]
    return [{"role": "user", "content": [part]} for part in parts]


def bodies(path, texts):
    """Bodies with the texts in each field, alone, in a list or in an object, in turns."""
    for number, field in enumerate(FIELDS[path].model_fields):
        text = texts[number % len(texts)]
        schema = {"type": "json_schema", "json_schema": {"schema": {"$ref": text}}, "$ref": text}
        yield from ({**BASES[path], field: value} for value in (text, [[text], schema][number % 2]))
    if "messages" in BASES[path]:
        for text in texts:
            yield from ({**BASES[path], "messages": [message]} for message in media(text))


@pytest.mark.parametrize("path", [path for path in BASES if not path.endswith("/render")])
def test_no_field_opens_a_file_or_an_address(http, server, watch, trap, tmp_path, path):
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"secret": 1}))
    port = trap.getsockname()[1]
    texts = [str(secret), f"file://{secret}", f"http://127.0.0.1:{port}/x.png", f"http://trap.invalid:{port}/x"]
    assert http.post(path, json=BASES[path]).status_code == 200  # what is loaded at the first request is loaded
    with watch:
        for body in bodies(path, texts):
            answer = http.post(path, json=body)
            assert answer.status_code < 500, (body, answer.text)
            assert 'secret": 1' not in answer.text
    opened = [arguments[0] for name, arguments in watch.seen if name in FILES]
    assert not [each for each in opened if not isinstance(each, int) and str(tmp_path) in os.fsdecode(each or "")]
    addresses = [arguments[1] for name, arguments in watch.seen if name in ADDRESSES]
    assert not [each for each in addresses if each[:2] != server.address]
    hosts = {arguments[0] for name, arguments in watch.seen if name == "socket.getaddrinfo"}
    assert hosts <= {"127.0.0.1", b"127.0.0.1"}
    for name, arguments in watch.seen:  # our own interpreter checks grammars, which it reads from its standard input
        if name in PROCESSES:
            assert name == "subprocess.Popen" and arguments[0] in (None, sys.executable), arguments
            assert arguments[1][0] == sys.executable and not any(text in str(arguments) for text in texts)
    assert is_untouched(trap)


def test_the_only_open_socket_is_that_of_the_server(process):
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    held = {**body, "guided_regex": "[a-z]{4}"}
    with httpx.Client(base_url=process.url, timeout=60) as http:
        for path, each in (("completions", body), ("chat/completions", chat), ("completions", held)):
            assert http.post(f"/v1/{path}", json=each).status_code == 200
        family = psutil.Process(process.process.pid)
        for each in (family, *family.children(recursive=True)):
            for connection in each.net_connections(kind="inet"):
                assert connection.laddr == ("127.0.0.1", process.port), connection
