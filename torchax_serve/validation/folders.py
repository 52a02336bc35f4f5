"""Checks of folders that are written to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from model_adapters.errors import InvalidArgumentError


def writable_folder(name: str, folder: str | Path) -> Path:
    """Returns the folder, made if it is not there.

    Args:
        name: Of the argument, for the error.
        folder: The argument's value.

    Raises:
        InvalidArgumentError: It cannot be made, or written to.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"{name}: expected a folder for new files, got {str(folder)!r} ({error.strerror}); name another"
        ) from error
    return path
