"""The record of a start: what a later start of the same model needs, and when it is valid.

A record is found by the arguments of `serve`, the folder of the checkpoint, our code, versions of the libraries,
settings of JAX and the processor. It is used if the files of the folder have the sizes and times that they had.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_adapters.disk_cache import FileSeal, SealedFolder, report_damage, touch
from model_adapters.loading.model_source import ModelSource
from torchax_serve.compilation.cache_folders import EVICTOR, START
from torchax_serve.compilation.environment import environment
from torchax_serve.compilation.xla_cache import programs_dir
from torchax_serve.start.model_record import ModelRecord

logger = logging.getLogger("torchax_serve")

CONTENT = "start records"
"""Name of the files, for messages."""
MAX_FILES = 200
"""Files of a model's folder; more are those of something else, and are not looked at."""
MAX_SHARE = 0.5
"""Fraction of the cache's limit that the weights of one model may take."""

FileState = tuple[str, int, int]
"""Path of a file, its size in bytes, and the time of its last change in nanoseconds."""


@dataclasses.dataclass(frozen=True)
class StartRecord:
    """What a start has found out about a model.

    Attributes:
        files: State of the checkpoint's files, and of the source of the model's class.
        identity: Name of the model in the cache of executables.
        weights_seal: Seal of the cache's own file of weights, which tells it from any other, with its size and time.
        model: The model.
    """

    files: tuple[FileState, ...]
    identity: str
    weights_seal: FileSeal
    model: ModelRecord


def states_of(checkpoint: Path, others: Sequence[Path] = ()) -> tuple[FileState, ...] | None:
    """Returns the state of all files in a folder, or of a GGUF file, and of `others`.

    None if there are too many.
    """
    paths = [path for path in sorted(checkpoint.rglob("*")) or [checkpoint] if path.is_file()]
    if len(paths) > MAX_FILES:
        return None
    return tuple(state_of(path) for path in [*paths, *others])


def state_of(path: Path) -> FileState:
    """Returns the state of a file; links are followed."""
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def start_folder(source: ModelSource, arguments: Mapping[str, str] | None) -> StartFolder | None:
    """Returns the place of the start record of a model.

    None for one of which no start is recorded.

    Args:
        source: The model.
        arguments: Arguments of `serve` that decide about the weights; None: no start is recorded.
    """
    checkpoint = source.gguf if source.kind == "folder" and source.gguf is not None else source.folder
    return None if checkpoint is None or arguments is None else StartFolder(checkpoint, arguments)


class StartFolder:
    """The record of one model and one set of arguments, on disk.

    Args:
        checkpoint: Folder with the checkpoint, or its GGUF file.
        arguments: Arguments of `serve` that decide about the weights.
    """

    def __init__(self, checkpoint: Path, arguments: Mapping[str, Any]) -> None:
        self.checkpoint = checkpoint.resolve()
        programs = programs_dir()
        assert programs is not None
        self.programs = programs
        self._files = SealedFolder(programs.parent / START, CONTENT)
        described = f"{self.checkpoint}\n{sorted(arguments.items())}\n{environment()}"
        self._name = hashlib.sha256(described.encode()).hexdigest()[:40]

    @property
    def _record_name(self) -> str:
        return f"record-{self._name}"

    @property
    def weights_path(self) -> Path:
        """The cache's own file of weights."""
        return self._files.path / f"weights-{self._name}.safetensors"

    def read(self) -> StartRecord | None:
        """Returns the record, if there is one and all files are as they were; never raises."""
        try:
            content = self._files.read(self._record_name)
            if content is None:
                return None
            record: StartRecord = pickle.loads(content)
            if self._is_valid(record):
                return record
        except Exception as error:  # intact, and written by other code: start as if it were not there
            logger.info("a start record is not used: %s: %s", type(error).__name__, error)
        return None

    def _is_valid(self, record: StartRecord) -> bool:
        others = [Path(path) for path, *_ in record.files if not Path(path).is_relative_to(self.checkpoint)]
        if states_of(self.checkpoint, others) != record.files:
            return False
        name = self.weights_path.name
        seal = self._files.state_of(name) if self._files.is_trusted() else None
        if seal is None:
            return False
        if seal != record.weights_seal:  # written to since: damaged, other weights, or the same ones again
            if (reason := self._files.damage(name)) is not None:
                report_damage(CONTENT, self.weights_path, reason)
                return False
            if seal.seal != record.weights_seal.seal:
                return False
        touch(self.weights_path)  # the least recently used files are removed first
        return True

    def write_weights(self, num_bytes: int, pieces: Any) -> FileSeal | None:
        """Writes the file of weights.

        Returns its seal, or None if it would take too much of the cache.
        """
        if num_bytes > EVICTOR.max_bytes * MAX_SHARE:
            return None
        self._files.write_pieces(self.weights_path.name, pieces)
        EVICTOR.wrote(num_bytes, self._files)
        return self._files.state_of(self.weights_path.name)

    def write(self, record: StartRecord) -> None:
        """Writes the record.

        Raises:
            OSError: it cannot be written.
        """
        self._files.write(self._record_name, pickle.dumps(record))
