"""Columns of docs/models.md about speed: the engine over eager PyTorch.

They are written by ``benchmarks/types_speed.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "speed" / "ratios.json"
HEADINGS = ("speed, 1", "speed, 8")
_REQUESTS = ("1", "8")


def write(
    about: Mapping[str, Any], ratios: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path = RESULTS
) -> None:
    """Writes ratios by task, model type and number of requests.

    Args:
        about: Command, machine, versions and dtype of the measurement; "summary" is the text of the page.
        ratios: Decode tokens/s of the engine over those of eager PyTorch.
        path: The file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": dict(about), "ratios": ratios}, indent=1) + "\n")


def read(path: Path = RESULTS) -> dict[str, Any] | None:
    """Reads what `write` has stored; None if there is no file."""
    return json.loads(path.read_text()) if path.is_file() else None


def headings(stored: Mapping[str, Any] | None, task: str) -> tuple[str, ...]:
    """Returns the headings of a task's columns; none where nothing of it was measured."""
    return HEADINGS if stored is not None and stored["ratios"].get(task) else ()


def cells(stored: Mapping[str, Any] | None, task: str, model_type: str) -> tuple[str, ...]:
    """Returns the cells under `headings` of a model type."""
    if stored is None or not headings(stored, task):
        return ()
    known = stored["ratios"][task].get(model_type, {})
    return tuple(f"{known[number]:.2g}" if number in known else "" for number in _REQUESTS)


def legend(stored: Mapping[str, Any] | None) -> str | None:
    """Returns the sentence that explains the columns; None without results."""
    return None if stored is None else _LEGEND.format(**stored["about"])


_LEGEND = """\
*speed, 1* and *8*: decode tokens/s of the engine over those of eager PyTorch's `generate`, for one request and for a
batch of eight, of a random model of the type with 50 to 200 million weights in {dtype}: `{command}` on {machine}.
[performance.md](performance.md#types-of-models) has more."""
