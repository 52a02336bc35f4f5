"""Writes tables of fields into docs: ``python -m torchax_serve.server.field_docs FILE``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from torchax_serve.server.openapi import REQUESTS
from torchax_serve.server.request_fields import field_table

BEGIN, END = "<!-- fields: made by torchax_serve.server.field_docs -->", "<!-- end of fields -->"


def tables() -> str:
    """Returns a table for each kind of request, with its routes as title."""
    parts = [f"### {', '.join(f'`{route}`' for route in kind.routes)}\n\n{field_table(kind)}" for kind in REQUESTS]
    return "\n\n".join(parts)


def with_tables(text: str) -> str:
    """Returns a document with the tables between its marks."""
    block = f"{BEGIN}\n\n{tables()}\n\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, text, flags=re.DOTALL)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text()))
