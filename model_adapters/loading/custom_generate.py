"""Generation code of a repository, ``custom_generate/generate.py``.

It replaces ``generate``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from model_adapters.errors import CheckpointError, UnsupportedModelError

FILE = Path("custom_generate", "generate.py")


def attach_own_generate(module: PreTrainedModel, folder: Path) -> None:
    """Gives `module` the repository's own ``generate``, if there is one.

    transformers' ``from_pretrained`` does the same. The function in the folder is called with the model as ``model``
    and with the caller's arguments as they are. Only for folders whose code the user trusts: it is imported here.

    Raises:
        UnsupportedModelError: a package that the code asks for is not installed.
        CheckpointError: the code does not load, or has no function ``generate``.
    """
    if not (folder / FILE).is_file():
        return
    model: Any = module  # the method is of a mixin that annotations of PreTrainedModel do not show
    try:
        function = model.load_custom_generate(str(folder), trust_remote_code=True, local_files_only=True)
    except ImportError as error:
        raise UnsupportedModelError(
            f"{folder / FILE} needs what is not installed ({_in_one_line(error)}): install it, or load the model "
            "without trust_remote_code"
        ) from error
    except Exception as error:  # somebody's code, imported
        raise CheckpointError(
            f"{folder / FILE} does not give a function `generate` ({type(error).__name__}: {_in_one_line(error)}): "
            "correct it, or load the model without trust_remote_code"
        ) from error
    model.generate = functools.partial(function, model=module)


def has_own_generate(module: PreTrainedModel) -> bool:
    """Tells whether the ``generate`` of `module` is code of its repository."""
    return "generate" in vars(module)


def _in_one_line(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
