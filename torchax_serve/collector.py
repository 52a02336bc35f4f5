"""Python's cycle collector, kept out of the way of moments that only build.

A full collection walks every object that torch, jax and transformers brought along, for about a quarter of a second,
and what starts it is that many objects are made: loading a model and tracing it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection inside; where the caller has switched it off, it stays off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
