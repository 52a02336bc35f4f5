"""Packages of the extras: whether one is installed, asked before anything heavy is imported."""

from __future__ import annotations

import importlib.util

from model_adapters.errors import UnsupportedArgumentError


def require_package(module: str, purpose: str, *, extra: str | None = None, package: str | None = None) -> None:
    """Checks that a package is installed, without importing it.

    Args:
        module: Name by which it is imported, such as ``PIL``.
        purpose: Name of the option or the work that needs it, with which the message begins.
        extra: Extra of this project that brings it; None: it is installed by its own name.
        package: Name of the package, where that of the module is another.

    Raises:
        UnsupportedArgumentError: It is not installed; the message says how to install it.
    """
    if importlib.util.find_spec(module) is None:
        name = package or module
        remedy = f"pip install {name}" if extra is None else f"pip install 'torchax-serve[{extra}]'"
        raise UnsupportedArgumentError(f"{purpose}: expected the package {name}, which is not installed; {remedy}")


def require_matplotlib(purpose: str = "plot") -> None:
    """Checks that plots can be drawn; raises UnsupportedArgumentError if not."""
    require_package("matplotlib", purpose, extra="plot")
