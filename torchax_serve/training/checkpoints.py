"""Checkpoints of a training run, by Orbax: complete or absent, and bit-exact."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading.memory import gigabytes
from torchax_serve.training.step import TrainState

FOLDER = "checkpoints"
"""Folder of the checkpoints in that of the run."""


def import_orbax() -> Any:
    """Returns the package ``orbax.checkpoint``.

    Raises:
        UnsupportedModelError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise UnsupportedModelError(
            "expected the package orbax-checkpoint for checkpoints, it is not installed; pip install "
            "'torchax-serve[train]'"
        ) from error
    return orbax.checkpoint


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps absl from printing the traces of Orbax's threads.

    The error that they end in says what they do.
    """
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


class Checkpoints:
    """The checkpoints in the folder of a run.

    Args:
        out: Folder of the run.
        num_kept: Checkpoints that stay; older ones are deleted.
        deciding: What decides the result of the run, as JSON values; other values in a checkpoint are an error.
    """

    def __init__(self, out: Path, num_kept: int, deciding: dict[str, Any]) -> None:
        self._orbax = import_orbax()
        self._folder, self._deciding = (out / FOLDER).absolute(), deciding
        options = self._orbax.CheckpointManagerOptions(
            max_to_keep=num_kept, create=True, enable_async_checkpointing=False
        )
        self._manager = self._orbax.CheckpointManager(self._folder, options=options)

    def save(self, step: int, state: TrainState, losses: list[float]) -> None:
        """Writes the checkpoint of `step` steps; does nothing if it is there.

        Raises:
            CheckpointError: it cannot be written, as on a full disk; those of before stay.
        """
        if self._manager.latest_step() == step:
            return
        num_bytes = sum(array.nbytes for array in jax.tree.leaves(vars(state)))
        if (free := shutil.disk_usage(self._folder).free) < num_bytes:  # Orbax would leave traces of its threads
            raise CheckpointError(
                f"{self._folder}: expected {gigabytes(num_bytes)} of free disk for the checkpoint of step {step}, got "
                f"{gigabytes(free)}; free some, and start the same run again"
            )
        args = self._orbax.args
        about = {"deciding": self._deciding, "losses": losses}
        try:
            with _quiet():
                self._manager.save(
                    step, args=args.Composite(state=args.StandardSave(vars(state)), about=args.JsonSave(about))
                )
                self._manager.wait_until_finished()
        except Exception as error:  # of several libraries, with the cause at the end of a long line
            raise CheckpointError(
                f"{self._folder}: expected to write the checkpoint of step {step}, and it cannot be written "
                f"({' '.join(str(error).split())[-120:]}); start the same run again where it can"
            ) from error

    def restore(self, like: TrainState) -> tuple[TrainState, list[float]] | None:
        """Returns the state of the last checkpoint and the losses so far; None if there is none.

        Args:
            like: State with the same shapes, dtypes and shardings.

        Raises:
            InvalidArgumentError: the checkpoint is of a run with other settings.
            CheckpointError: it cannot be read.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        args = self._orbax.args
        abstract = jax.tree.map(self._orbax.utils.to_shape_dtype_struct, vars(like))
        try:
            about = self._manager.restore(step, args=args.Composite(about=args.JsonRestore())).about
            self._check_same(about["deciding"])
            found = self._manager.restore(step, args=args.Composite(state=args.StandardRestore(abstract))).state
        except InvalidArgumentError:
            raise
        except Exception as error:  # of several libraries
            raise CheckpointError(
                f"{self._folder / str(step)}: expected a readable checkpoint ({' '.join(str(error).split())[:200]}); "
                "delete its folder to continue from the one before, or choose another --out"
            ) from error
        return TrainState(**found), list(about["losses"])

    def _check_same(self, before: dict[str, Any]) -> None:
        changed = sorted(k for k in {*before, *self._deciding} if before.get(k) != self._deciding.get(k))
        if changed:
            name = changed[0]
            raise InvalidArgumentError(
                f"{name}: expected {before.get(name)!r} as in the checkpoint in {self._folder}, got "
                f"{self._deciding.get(name)!r}; choose the same to go on, or another --out to start anew"
            )

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()
