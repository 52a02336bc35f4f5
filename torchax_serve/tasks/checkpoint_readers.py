"""What of a checkpoint makes a model's inputs: its image processor or feature extractor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Self

from transformers import AutoFeatureExtractor, AutoImageProcessor

from model_adapters.errors import CheckpointError, UnsupportedModelError
from model_adapters.loading import LoadedModel

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files, one of which says how inputs are made."""
_CLASSES: dict[str, Any] = {"image_processor": AutoImageProcessor, "feature_extractor": AutoFeatureExtractor}


@dataclasses.dataclass(frozen=True)
class CheckpointFiles:
    """Where the files of a model are.

    Attributes:
        name: Of the model, for messages.
        folder: With its files; None if there is none.
        trust_remote_code: Whether code in them may run.
    """

    name: str
    folder: Path | None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self:
        """Returns those of a loaded model."""
        return cls(loaded.source.name, loaded.files_folder, loaded.trust_remote_code)


def checkpoint_reader(files: CheckpointFiles, name: str) -> Any:
    """Returns the checkpoint's image processor or feature extractor; None without `FILES`.

    Args:
        files: Of the model.
        name: ``image_processor`` or ``feature_extractor``, as the arguments of transformers' pipelines.

    Raises:
        UnsupportedModelError: it needs a package that is missing.
        CheckpointError: its files are broken.
    """
    folder, words = files.folder, name.replace("_", " ")
    if folder is None or not any((folder / file).is_file() for file in FILES):
        return None
    try:
        return _CLASSES[name].from_pretrained(folder, local_files_only=True, trust_remote_code=files.trust_remote_code)
    except ImportError as error:
        lines = str(error).strip().splitlines()
        raise UnsupportedModelError(
            f"{files.name}: expected the packages of its {words}, got {' '.join(lines[:2])}; install what is missing"
        ) from error
    except Exception as error:  # classes of processors raise whatever they like
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"the files in {folder} do not make {'an' if words[0] == 'i' else 'a'} {words} ({lines[0]}): get them again"
        ) from error
