"""The page at ``/``: models, memory, speed and a chat, from this server's files alone."""

from __future__ import annotations

import functools
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).with_name("page_files")
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
"""File and type of each path. They hold nothing of the server, and so need no key."""
HEADERS = {
    # Answers are shown as text; were one taken for a page's code after all, the browser would not run it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """Returns a page with the models, the server's load and a chat, or a file of it."""
    name, kind = FILES[request.scope["path"]]
    return Response(_content(name), media_type=kind, headers=HEADERS)


@functools.cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
