"""Pause of Python's cycle collector while models are loaded and traced.

A full collection visits every object of torch, jax and transformers, which takes about a quarter of a second. The
creation of many objects starts it, as in loading a model and tracing it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG_THRESHOLD = 20_000
"""Objects made and not let go with which young ones are collected, in a process that serves; Python itself takes 700.

A dispatch for 256 requests makes some 1,500 that are gone with the next one. Walking them takes half a millisecond.
"""


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Disables garbage collection inside the block; restores the caller's setting."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def paused_for_imports() -> Iterator[None]:
    """Disables garbage collection inside the block; what was made there counts as old.

    torch, jax and transformers make 800,000 permanent objects. Otherwise the collector would traverse them repeatedly
    while they are made, and once more when it is enabled again.
    """
    with paused():
        try:
            yield
        finally:
            if gc.get_freeze_count() == 0:  # else somebody keeps objects out of collections, and they would be let in
                gc.freeze()
                gc.unfreeze()  # into the oldest generation


def freeze_for_serving() -> None:
    """Collects and freezes live objects (`gc.freeze`), for a process that serves until it ends.

    A full collection comes whenever a quarter more objects are alive, and holds every request up meanwhile; one of the
    young ones would come once or twice a dispatch, and comes with `YOUNG_THRESHOLD` of them from then on.
    """
    gc.collect()
    gc.freeze()
    collect_rarely()


def collect_rarely() -> None:
    """Has young objects collected from `YOUNG_THRESHOLD` of them on, and freezes none.

    For a process that serves and also unloads models, whose objects must not be frozen.
    """
    young, *older = gc.get_threshold()
    if young:  # 0: the caller has switched collections off
        gc.set_threshold(max(young, YOUNG_THRESHOLD), *older)
