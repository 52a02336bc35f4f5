"""Settings of JAX while programs are traced and run; imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def jax_promotion() -> Iterator[None]:
    """Applies JAX's default rules for shapes and dtypes inside, whatever a script has set."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@contextlib.contextmanager
def programs_run() -> Iterator[None]:
    """Allows ``jit`` and transfers inside, even if a script has disabled or guards them."""
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        yield
