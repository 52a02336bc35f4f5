"""Pathways: one process whose JAX has the devices of all slices, behind a proxy.

Google Cloud runs the service; ``JAX_PLATFORMS=proxy`` and ``JAX_BACKEND_TARGET`` say where it is, and ``pathwaysutils``
registers its backend with JAX. All devices are local to the process then, so that no hosts have to be named.
"""

from __future__ import annotations

import jax

from model_adapters.errors import TorchaxServeError

PLATFORM = "proxy"


def is_requested() -> bool:
    """Returns whether JAX is told to use Pathways."""
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    return PLATFORM in platforms.split(",")


def connect() -> None:
    """Registers the backend of Pathways with JAX if JAX is told to use it.

    It has to be called before JAX looks for devices.

    Raises:
        TorchaxServeError: ``pathwaysutils`` is not installed.
    """
    if not is_requested():
        return
    try:
        import pathwaysutils
    except ImportError as error:
        raise TorchaxServeError(
            "JAX_PLATFORMS: expected pathwaysutils for 'proxy', which is not installed; pip install "
            "'torchax-serve[pathways]', or name another platform"
        ) from error
    pathwaysutils.initialize()
