"""The page at ``/`` for people, and its numbers (``/stats``)."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve import __version__
from torchax_serve.outputs import EngineStats
from torchax_serve.server.context import ServerContext, context_of
from torchax_serve.server.key_limits import ApiKey
from torchax_serve.server.model_service import ModelService

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


async def stats(request: Request) -> Response:
    """Returns what the server holds and does now."""
    context = context_of(request)
    context.only_service()  # raises unless requests are answered
    return JSONResponse(await asyncio.to_thread(_stats, context, request.state.key))


def _stats(context: ServerContext, key: ApiKey | None) -> dict[str, Any]:
    import psutil  # type: ignore[import-untyped]

    if context.pool is not None:
        known = [(each.spec.names, each.status, each.service, each.num_bytes) for each in context.pool.models]
    else:
        known = [(service.names, "loaded", service, service.num_bytes) for service in context.loaded]
    entries = [
        {"name": names[0], "status": status, "size_bytes": size, **_of_model(service)}
        for names, status, service, size in known
        if key is None or key.allows(names[0])
    ]
    machine = psutil.virtual_memory()
    return {
        "version": __version__,
        "models": entries,
        "memory": {
            "process_bytes": psutil.Process().memory_info().rss,
            "available_bytes": machine.available,
            "total_bytes": machine.total,
        },
        "num_requests": max(0, context.num_in_flight - 1),  # without this one
    }


def _of_model(service: ModelService | None) -> dict[str, Any]:
    """Returns the tasks and counts of a model; of one that is not loaded they are not known."""
    if service is None:
        return {"tasks": None, "max_model_len": None, "takes_images": None, **_counts(None)}
    return {
        "tasks": list(service.tasks),
        "max_model_len": service.max_model_len,
        "takes_images": service.takes_images,
        **_counts(service.model.stats()),
    }


def _counts(found: EngineStats | None) -> dict[str, Any]:
    """Returns the counts of an engine; zeros where none has been made."""
    if found is None:
        names = ("num_running", "num_waiting", "tokens_per_s", "cache_usage", "num_prompt_tokens", "num_hit_tokens")
        return dict.fromkeys((*names, "num_new_tokens"), 0)
    scheduler = found.scheduler
    total = sum(group.num_pages for group in scheduler.pages)
    return {
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "tokens_per_s": round(found.tokens_per_s, 1),
        "cache_usage": round(sum(group.num_used for group in scheduler.pages) / total, 4) if total else 0,
        "num_prompt_tokens": scheduler.num_prompt_tokens,
        "num_hit_tokens": scheduler.num_hit_tokens,
        "num_new_tokens": scheduler.num_new_tokens,
    }
