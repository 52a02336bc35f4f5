"""Writes tables of fields into docs: ``python -m torchax_serve.server.field_docs FILE``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from torchax_serve.server.openapi import REQUESTS
from torchax_serve.server.request_fields import ApiRequest, Effect, FieldNote, field_table, notes_of, table_of

BEGIN, END = "<!-- fields: made by torchax_serve.server.field_docs -->", "<!-- end of fields -->"
GROUPS = (
    ("/v1/chat/completions", "/v1/completions"),
    ("/v1/messages", "/v1/messages/count_tokens"),
    ("/api/chat", "/api/generate"),
    ("/v1/embeddings", "/pooling", "/classify", "/v1/rerank", "/v1/score"),
    ("/embed", "/embed_all"),
)
"""First routes of kinds of requests that have most fields in common, which are in one table."""
EVERYWHERE = "model"
"""Field that is explained once, in front of the tables, where it has the same meaning as for chats."""
Key = tuple[str, Effect, str]
"""Name of a field, effect and text of its note."""


def tables() -> str:
    """Returns a table for each kind of request; what a group has in common is in one table."""
    kinds = {kind.routes[0]: kind for kind in REQUESTS}
    first_of = {route: group[0] for group in GROUPS for route in group}
    groups: dict[str, list[type[ApiRequest]]] = {}
    for route, kind in kinds.items():
        groups.setdefault(first_of.get(route, route), []).append(kind)
    note = notes_of(REQUESTS[0])[EVERYWHERE]
    lead = f"`{EVERYWHERE}`, on each route that takes it and unless its table says otherwise: {note.text}."
    return "\n\n".join([lead, *(_section(each, (EVERYWHERE, note.effect, note.text)) for each in groups.values())])


def _section(kinds: Sequence[type[ApiRequest]], everywhere: Key) -> str:
    """Returns the fields of some kinds of requests: first those that all explain alike."""
    common = [each for each in _keys(kinds[0]) if each != everywhere and all(each in _keys(kind) for kind in kinds)]
    names = {name for name, _, _ in common}
    parts = [f"### {', '.join(_routes(kind) for kind in kinds)}"]
    parts += [table_of({name: FieldNote(effect, text) for name, effect, text in common})] if common else []
    for kind in kinds:
        left_out = names | {key[0] for key in _keys(kind) if key == everywhere}
        if not left_out >= set(kind.model_fields):
            parts.append(f"Further fields of {_routes(kind)}:\n\n{field_table(kind, left_out)}")
    return "\n\n".join(parts)


def _routes(kind: type[ApiRequest]) -> str:
    return ", ".join(f"`{route}`" for route in kind.routes)


def _keys(kind: type[ApiRequest]) -> list[Key]:
    """Returns (name, effect, text) of each field, by name."""
    return [(name, note.effect, note.text) for name, note in sorted(notes_of(kind).items())]


def with_tables(text: str) -> str:
    """Returns a document with the tables between its marks."""
    block = f"{BEGIN}\n\n{tables()}\n\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, text, flags=re.DOTALL)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text()))
