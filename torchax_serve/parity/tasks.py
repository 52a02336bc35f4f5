"""Parity tasks, and the results of each that come with this package.

``benchmarks/parity.py`` makes them.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections import Counter
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from typing import Any

from packaging.version import Version

from torchax_serve.parity.result import PACKED, PASSED, PER_SEQUENCE, STATIC, TRANSFORMERS_LOOP, Result

RESULTS = importlib.resources.files(__package__) / "results"


@dataclasses.dataclass(frozen=True)
class ParityTask:
    """Parity check of all model types in one mapping of transformers.

    Attributes:
        title: Title of its section in docs/models.md.
        mapping: Name of the mapping in ``transformers.models.auto.modeling_auto``; several are joined by "|". Empty if
            what is checked are not model types.
        executors: Executors that the results name, in the order of docs/models.md; empty for models that do not
            generate.
    """

    title: str
    mapping: str = ""
    executors: tuple[str, ...] = ()

    @property
    def is_of_types(self) -> bool:
        """Whether the names to check are model types."""
        return bool(self.mapping)

    def types(self) -> list[str]:
        """Returns every model type of the mapping in the installed transformers."""
        from transformers.models.auto import modeling_auto

        names = self.mapping.split("|") if self.mapping else []
        return sorted({each for name in names for each in getattr(modeling_auto, name)})


CAUSAL = "causal"
CHECKPOINTS = "checkpoints"
"""Task of published configurations, read from a folder outside of this project."""
HEADS = "heads"
"""Task of the models with a head for each further task of transformers."""
CONFIGURATIONS = "configurations"
"""Task of what checkpoints of one type vary."""
STARTS = "starts"
"""Task of a second process that serves what a first has left on disk."""
_ALL = (PACKED, PER_SEQUENCE, STATIC, TRANSFORMERS_LOOP)
TASKS: dict[str, ParityTask] = {
    CAUSAL: ParityTask("Models", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _ALL[:3]),
    "seq2seq": ParityTask("Sequence to sequence", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _ALL),
    "speech": ParityTask("Speech to text", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _ALL),
    "encoder": ParityTask("Encoders", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES|MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "classifier": ParityTask("Classifiers", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "images": ParityTask("Images and text", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", _ALL),
    HEADS: ParityTask("Heads for other tasks"),
    CONFIGURATIONS: ParityTask("Configurations", executors=_ALL[:3]),
    STARTS: ParityTask("Second starts", executors=_ALL[:2]),
    CHECKPOINTS: ParityTask("Checkpoints by name"),
}
"""Parity tasks by name, in the order of docs/models.md."""

Sweep = tuple[dict[str, str], dict[str, Result]]
"""Versions of libraries, and results by model type."""


def read(path: Traversable) -> Sweep:
    """Reads the sweep in a file."""
    content = json.loads(path.read_text())
    return content["versions"], {name: Result(**fields) for name, fields in content["results"].items()}


def folder_of(task: str) -> Traversable:
    """Returns the folder with the results of a task."""
    return RESULTS if task == CAUSAL else RESULTS / task


def all_shipped(task: str = CAUSAL) -> list[Sweep]:
    """Reads the sweeps in the package, one for each version of transformers, the newest first."""
    folder = folder_of(task)
    files = [path for path in folder.iterdir() if path.name.endswith(".json")] if folder.is_dir() else []
    return sorted((read(path) for path in files), key=lambda sweep: Version(sweep[0]["transformers"]), reverse=True)


def shipped(task: str = CAUSAL, transformers: str | None = None) -> Sweep:
    """Reads the sweep in the package with this version of transformers, or else with the newest."""
    sweeps = all_shipped(task)
    return next((sweep for sweep in sweeps if sweep[0]["transformers"] == transformers), sweeps[0])


def executor_counts(results: Mapping[str, Result]) -> dict[str, int]:
    """Counts the causal types that pass on each executor."""
    counts = Counter(result.executor for result in results.values() if result.status == PASSED)
    return {executor: counts[executor] for executor in TASKS[CAUSAL].executors}


def summary(results: Mapping[str, Result]) -> dict[str, Any]:
    """Counts the types that were checked, that passed, and that pass on each executor."""
    passed = sum(result.status == PASSED for result in results.values())
    return {"passed": passed, "checked": len(results), "executors": executor_counts(results)}
