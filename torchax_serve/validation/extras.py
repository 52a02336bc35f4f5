"""Packages of the extras: whether one is installed, asked before anything heavy is imported."""

from __future__ import annotations

import importlib.util

from model_adapters.errors import UnsupportedArgumentError


def require_package(module: str, purpose: str, *, install: str, package: str | None = None) -> None:
    """Checks that a package is installed that this project runs without, without importing it.

    Args:
        module: Name by which it is imported, such as ``PIL``.
        purpose: Name of the option or the work that needs it, with which the message begins.
        install: Argument of ``pip install`` that brings it, such as ``torchax-serve[images]``.
        package: Name of the package, where that of the module is another.

    Raises:
        UnsupportedArgumentError: It is not installed; the message says how to install it.
    """
    if importlib.util.find_spec(module) is None:
        raise UnsupportedArgumentError(
            f"{purpose}: expected the package {package or module}, which is not installed; pip install '{install}'"
        )


def require_matplotlib(purpose: str = "plot") -> None:
    """Checks that plots can be drawn; raises UnsupportedArgumentError if not."""
    require_package("matplotlib", purpose, install="torchax-serve[plot]")
