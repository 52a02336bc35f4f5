"""Conditions on traced values, collected in a trace and returned by its program."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax


class TracedConditions(threading.local):
    """The list for conditions of one kind, by thread; None outside of `collect`."""

    found: list[jax.Array] | None = None

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[jax.Array]]:
        """Yields the list of the conditions bool[] that model code makes inside."""
        before, self.found = self.found, []
        try:
            yield self.found
        finally:
            self.found = before
