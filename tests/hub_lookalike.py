"""A server on 127.0.0.1 that answers as the Hugging Face Hub does: repository info, file metadata, files, refusals."""

import contextlib
import hashlib
import json
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    folder: Path
    token: str | None = None  # gated: only who shows it gets files
    private: bool = False  # hidden from everyone else
    revisions: tuple[str, ...] = ("main", COMMIT)
    branches: dict[str, tuple[str, Path]] = field(default_factory=dict)  # further ones: name to commit and folder
    broken: dict[str, tuple[int, str | None]] = field(default_factory=dict)  # of a file: what it is refused with
    cut: dict[str, int] = field(default_factory=dict)  # of a file: the bytes after which the connection ends, once
    listed: tuple[str, ...] = ()  # further names in the list of files

    def at(self, revision):
        """The commit of a revision, and the folder with its files."""
        for name, (commit, folder) in self.branches.items():
            if revision in (name, commit):
                return commit, folder
        return COMMIT, self.folder

    def files(self, revision):
        folder = self.at(revision)[1]
        return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    status: int | None = None  # answer everything with this
    endpoint: str = ""
    pause_s: float = 0.0  # before the content of a file is sent
    most_at_once: int = 0  # contents that were being sent at one moment
    ranges: list[str] = field(default_factory=list)  # parts of files that were asked for
    _at_once: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def sending(self):
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            time.sleep(self.pause_s)
            yield
        finally:
            with self._lock:
                self._at_once -= 1

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
            return self._checked(repository, revision, lambda: self._info(name, repository, revision))
        if parts[2:3] != ["resolve"]:  # the client asks for things of its own as well
            return self._refuse(404, None)
        name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        repository = self.hub.repositories.get(name)
        return self._checked(repository, revision, lambda: self._file(repository, revision, file, with_body), gate=True)

    def _checked(self, repository, revision, answer, gate=False):
        shown = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or (repository.private and shown != repository.token):
            return self._refuse(401, "RepoNotFound")
        if gate and repository.token and shown != repository.token:
            return self._refuse(403 if shown else 401, "GatedRepo")
        known = {*repository.revisions, *repository.branches, *(commit for commit, _ in repository.branches.values())}
        if revision not in known:
            return self._refuse(404, "RevisionNotFound")
        return answer()

    def _info(self, name, repository, revision):
        files = repository.files(revision).items()
        siblings = [{"rfilename": file, "size": path.stat().st_size} for file, path in files]
        siblings += [{"rfilename": file, "size": 1} for file in repository.listed]
        content = {"id": name, "sha": repository.at(revision)[0], "siblings": siblings}
        return self._send(200, json.dumps(content).encode(), "application/json")

    def _file(self, repository, revision, file, with_body):
        path = repository.files(revision).get(file)
        if file in repository.broken:
            return self._refuse(*repository.broken[file])
        if path is None:
            return self._refuse(404, "EntryNotFound")
        body, headers = path.read_bytes(), {"X-Repo-Commit": repository.at(revision)[0], "Accept-Ranges": "bytes"}
        headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
        asked, start, status = self.headers.get("Range"), 0, 200
        if with_body and asked and asked != "bytes=0-":
            self.hub.ranges.append(asked)
            start, status = int(asked.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        if not with_body:
            return self._send(200, body, "application/octet-stream", False, **headers)
        with self.hub.sending():
            cut = repository.cut.pop(file, None)
            return self._send(status, body[start:], "application/octet-stream", num_bytes=cut, **headers)

    def _refuse(self, status, code):
        return self._send(status, b"", "text/plain", **({"X-Error-Code": code} if code else {}))

    def _send(self, status, body, kind, with_body=True, num_bytes=None, **headers):
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
            self.wfile.write(body[:num_bytes])
        if num_bytes is not None:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # a client may hang up
            super().handle_error(request, client_address)


def point_at(monkeypatch, endpoint):
    """huggingface_hub reads HF_ENDPOINT when it is imported; later it looks here."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


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
