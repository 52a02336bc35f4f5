"""How far the start of a server is, for ``/readyz`` and on a terminal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from model_adapters.loading.progress import Advance, RichProgress, Unit

_WORDS = frozenset(
    ("loading", "downloading", "drawing", "random", "weights", "building", "kernels", "compiling", "programs")
)
"""Words of stages that everybody may read."""
_READING = ("loading", "downloading", "drawing")
"""First words of stages in which the weights come."""


class StartProgress:
    """Counts what loading and warm-up have done, and shows bars.

    It is a `model_adapters.loading.progress.Progress`.
    """

    def __init__(self) -> None:
        self._bars = RichProgress()
        self._lock = threading.Lock()
        self._stage: dict[str, Any] = {}

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> Iterator[Advance]:
        """Counts until the stage ends; threads may advance it together."""
        stage: dict[str, Any] = {"name": name, "done": 0, "total": total, "unit": unit}
        self._stage = stage
        with self._bars.stage(name, total, unit) as show:

            def advance(amount: int) -> None:
                with self._lock:
                    stage["done"] += amount
                    show(amount)

            try:
                yield advance
            finally:
                self._stage = {}

    def shown(self) -> dict[str, Any]:
        """Returns name, `done`, `total` and `unit` of the stage that runs; nothing between stages.

        Names of models and folders are left out: ``/readyz`` needs no key.
        """
        stage = dict(self._stage)
        if stage:
            stage["name"] = " ".join(word for word in stage["name"].split() if word in _WORDS)
        return stage

    @property
    def reads_weights(self) -> bool:
        """Whether the stage that runs reads, fetches or draws the weights."""
        return self._stage.get("name", "").startswith(_READING)
