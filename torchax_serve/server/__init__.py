"""OpenAI-compatible HTTP server: ``torchax-serve serve MODEL``.

The application is Starlette's, on uvicorn's protocol class with limits (`torchax_serve.server.http_protocol`).
It needs the packages of the extra ``server``; `require_packages` names the first one that is missing.
"""

from __future__ import annotations

import importlib.util

from model_adapters.errors import UnsupportedArgumentError

PACKAGES = ("starlette", "uvicorn", "httptools", "pydantic", "python_multipart", "prometheus_client")
"""Modules that the server cannot start without; the rest of the extra is imported where it is needed."""


def require_packages(*names: str) -> None:
    """Checks that packages of the extra ``server`` are installed.

    Args:
        names: Modules to look for; those of `PACKAGES` without any.

    Raises:
        UnsupportedArgumentError: One is missing; the message says how to install it.
    """
    for name in names or PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise UnsupportedArgumentError(
                f"expected the package {name.replace('_', '-')} for the server, found none; "
                "pip install 'torchax-serve[server]'"
            )
