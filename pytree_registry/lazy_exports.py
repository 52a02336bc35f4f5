"""Packages whose names are imported on first use, so that importing them costs nothing."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str,
    modules: Mapping[str, str],
    importing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        package: the package's ``__name__``.
        modules: for each exported name the module that defines it; one that begins with a dot lies in the package.
        importing: a context in which those modules are imported.
    """

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with importing():
            try:
                module = importlib.import_module(modules[name], package)
            except AttributeError as error:  # Python would take it for a name that the package has not
                raise ImportError(f"{package}.{name} cannot be imported: {error}") from error
            value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted(vars(sys.modules[package])["__all__"])

    return get_attribute, list_names
