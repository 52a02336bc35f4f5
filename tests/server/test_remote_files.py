"""Files of a chat by their address: from hosts on the list alone, bounded in bytes, redirects and time."""

import asyncio
import contextlib
import http.server
import socket
import threading
import time

import pytest

from torchax_serve.server import remote_files
from torchax_serve.server.errors import ApiError
from torchax_serve.server.remote_files import fetch, with_remote_files

FILE = bytes(range(256)) * 8


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        if self.path == "/slow":
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"H")
                    time.sleep(0.05)
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(FILE * (2000 if self.path == "/large" else 1))

    def log_message(self, *arguments):
        pass


@pytest.fixture
def files():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def host_of(server):
    return f"127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("path", ["/cat", "/cat?size=1", "/to//cat", "/to//to//cat"])
def test_files_of_listed_hosts(files, path):
    assert fetch("here", f"http://{host_of(files)}{path}", [host_of(files)]) == FILE


def test_nothing_else_is_asked(files):
    url = f"http://{host_of(files)}/cat"
    for hosts, other in (
        ([], url),
        (["127.0.0.1"], url),
        ([host_of(files)], url.replace("http:", "ftp:")),
        ([host_of(files)], url.replace("127", "user@127")),
        ([host_of(files)], url.replace("127.0.0.1", "localhost")),
        ([f"localhost:{files.server_port}"], url.replace("127.0.0.1", "localhost")),  # a name with a private address
    ):
        with pytest.raises(ApiError) as caught:
            fetch("messages[0].content[1]", other, hosts)
        assert (caught.value.status, caught.value.param) == (400, "messages[0].content[1]")
    assert files.asked == []


def test_redirects_are_checked_too(files):
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        other = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/secret"
        for target, message in ((other, "allowed to fetch"), ("file:///etc/passwd", "allowed"), ("/none", "404")):
            with pytest.raises(ApiError, match=message):
                fetch("here", f"http://{host_of(files)}/to/{target}", [host_of(files)])
        elsewhere.settimeout(0.1)
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    with pytest.raises(ApiError, match="at most 3 redirects"):
        fetch("here", f"http://{host_of(files)}" + "/to/" * 5 + "/cat", [host_of(files)])


def test_bounds(files, monkeypatch):
    monkeypatch.setattr(remote_files, "MAX_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(remote_files, "TIMEOUT_S", 0.5)
    for path, message in (("/large", "at most 1048576 bytes"), ("/slow", r"within 0\.5 s")):
        with pytest.raises(ApiError, match=message):
            fetch("here", f"http://{host_of(files)}{path}", [host_of(files)])


def test_parts_become_data_urls(files):
    url = f"http://{host_of(files)}/cat"
    parts = [
        {"type": "text", "text": url},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "input_image", "image_url": url},
    ]
    given = [{"role": "user", "content": parts}, {"role": "user", "content": "Hi"}]
    found = asyncio.run(with_remote_files(given, [host_of(files)]))
    _, image, other = found[0]["content"]
    assert image["image_url"]["url"] == other["image_url"] and image["image_url"]["detail"] == "low"
    assert other["image_url"].startswith("data:application/octet-stream;base64,AAECAw")
    assert parts[2]["image_url"] == url and found[1] == given[1]
    assert asyncio.run(with_remote_files(given, [])) == given
    with pytest.raises(ApiError, match="at most 8 files"):
        asyncio.run(with_remote_files(given * 5, [host_of(files)]))
