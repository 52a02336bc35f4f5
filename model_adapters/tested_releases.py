"""Releases of Python and of the libraries underneath that this version was tested with.

A newer one is used like the others: nothing is known to break there. What fails with it fails with an error, and the
log has said once that it is newer.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
import re

logger = logging.getLogger("torchax_serve")

NOT_TESTED_FROM = {"python": "3.13", "torch": "2.14", "jax": "0.12", "transformers": "5.25"}
"""First release, by package, that is newer than those tested."""


def newer_releases() -> dict[str, str]:
    """Returns the installed version, by package, of what is newer than what was tested."""
    found = {}
    for name, limit in NOT_TESTED_FROM.items():
        version = platform.python_version() if name == "python" else _version(name)
        if version is not None and _numbers(version) >= _numbers(limit):
            found[name] = version
    return found


@functools.cache
def log_newer_releases() -> None:
    """Writes one line to the log of the process if a package is newer than what was tested."""
    if newer := newer_releases():
        named = ", ".join(f"{name} {version} (tested below {NOT_TESTED_FROM[name]})" for name, version in newer.items())
        logger.warning("newer than what this version was tested with: %s; torchax-serve verify compares a model", named)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers in front, such as (2, 13) of ``2.13.0+cpu``; two of them decide."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else ()
