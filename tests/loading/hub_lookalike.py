"""A server on 127.0.0.1 that answers as the Hugging Face Hub does: repository info, file metadata, files, refusals."""

import contextlib
import hashlib
import json
import sys
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    folder: Path
    token: str | None = None  # gated: only who shows it gets files
    private: bool = False  # hidden from everyone else
    revisions: tuple[str, ...] = ("main", COMMIT)

    def files(self):
        return {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    status: int | None = None  # answer everything with this
    endpoint: str = ""

    def fetched(self):
        """Names of the files whose content was sent."""
        return [
            path.split("/resolve/")[1].split("/", 1)[1]
            for verb, path in self.requests
            if verb == "GET" and "/resolve/" in path
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args): ...

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.hub.requests.append((self.command, path))
        if self.hub.status is not None:
            return self._refuse(self.hub.status, None)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, revision = "/".join(parts[2:4]), "/".join(parts[5:]) or "main"
            repository = self.hub.repositories.get(name)
            return self._checked(repository, revision, lambda: self._info(name, repository))
        if parts[2:3] != ["resolve"]:  # the client asks for things of its own as well
            return self._refuse(404, None)
        name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        repository = self.hub.repositories.get(name)
        return self._checked(repository, revision, lambda: self._file(repository, file, with_body), gate=True)

    def _checked(self, repository, revision, answer, gate=False):
        shown = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or (repository.private and shown != repository.token):
            return self._refuse(401, "RepoNotFound")
        if gate and repository.token and shown != repository.token:
            return self._refuse(403 if shown else 401, "GatedRepo")
        if revision not in repository.revisions:
            return self._refuse(404, "RevisionNotFound")
        return answer()

    def _info(self, name, repository):
        siblings = [{"rfilename": file, "size": path.stat().st_size} for file, path in repository.files().items()]
        return self._send(
            200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), "application/json"
        )

    def _file(self, repository, file, with_body):
        path = repository.files().get(file)
        if path is None:
            return self._refuse(404, "EntryNotFound")
        body = path.read_bytes()
        return self._send(200, body, "application/octet-stream", with_body, ETag=f'"{hashlib.sha1(body).hexdigest()}"')

    def _refuse(self, status, code):
        return self._send(status, b"", "text/plain", **({"X-Error-Code": code} if code else {}))

    def _send(self, status, body, kind, with_body=True, **headers):
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": len(body),
            "X-Repo-Commit": COMMIT,
            **headers,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # a client may hang up
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving():
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
