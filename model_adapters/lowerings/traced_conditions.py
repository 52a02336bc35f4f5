"""Conditions on traced values, collected in a trace and returned by its program."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

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

    @contextlib.contextmanager
    def collect_if_collected(self) -> Iterator[list[jax.Array]]:
        """Yields a list of the conditions made inside, if conditions are collected outside.

        Otherwise it stays empty.
        """
        if self.found is None:
            yield []
        else:
            with self.collect() as found:
                yield found

    def add(self, conditions: Iterable[jax.Array]) -> None:
        """Adds conditions that a traced function has returned."""
        if self.found is not None:
            self.found.extend(conditions)
