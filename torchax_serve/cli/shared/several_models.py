"""MODELs of a server's command line: ``NAME=MODEL``, and several of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.model_source import public_name
from torchax_serve.validation.library_objects import is_pipeline_folder

Named = tuple[tuple[str, ...], str | None]
"""Names of a model for requests, none for that which it is loaded by, and the model; None: the embedded one."""

_NAMES = re.compile(r"[^/=\s,]+(,[^/=\s,]+)*")
_OF_ONE = {
    "served_model_name": "write NAME,OTHER_NAME=MODEL",
    "watch": "start a server of the bundle alone",
    "speculative_config": "start a server of that model alone",
    "kv_events_config": "start a server of that model alone",
    "revision": "download it before, by torchax-serve pull",
    "explain": "ask for one model",
}
"""Options that are about one model, and what to do where several are served."""


def named_model(given: str) -> Named:
    """Returns the names and the model of ``NAME,OTHER=MODEL`` or ``MODEL``.

    Raises:
        InvalidArgumentError: a name or the model is missing.
    """
    names, sign, model = given.partition("=")
    if not sign or Path(given).exists():  # a path may have the sign
        return (), given
    if not _NAMES.fullmatch(names) or not model:
        raise InvalidArgumentError(f"MODEL: expected NAME=MODEL, or MODEL alone, got {given!r}")
    return tuple(names.split(",")), None if model == "embedded" else model


def names_of(named: Named) -> tuple[str, ...]:
    """Returns the names of a model for requests, of which there is at least one."""
    names, model = named
    return names or (public_name(model),)


def check_several(named: Sequence[Named], given: Mapping[str, Any]) -> None:
    """Checks the models of a server together.

    Args:
        named: The models.
        given: Options of the command line, by the name of the field.

    Raises:
        InvalidArgumentError: two have one name, or an option is about one model where there are several.
    """
    if len(named) == 1:
        if named[0][0] and "served_model_name" in given:
            names = ",".join(named[0][0])
            raise InvalidArgumentError(
                f"--served-model-name: expected without names in MODEL, got {names}; leave one of them out"
            )
        return
    for option, remedy in _OF_ONE.items():
        if option in given:
            flag = option.replace("_", "-")
            raise InvalidArgumentError(f"--{flag}: expected one model, got {len(named)}; {remedy}")
    every = [name for each in named for name in names_of(each)]
    if twice := [name for index, name in enumerate(every) if name in every[:index]]:
        raise InvalidArgumentError(f"MODEL: expected each name once, got {twice[0]} twice; write NAME=MODEL")


def adapters_by_model(named: Sequence[Named], given: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns folders by name, by the first name of a model, of ``NAME@BASE=FOLDER``.

    Args:
        named: The models, of which there are several.
        given: Values of the option.

    Raises:
        InvalidArgumentError: A part is missing, the model is none of these, or a name is taken.
    """
    bases = {name: names_of(each)[0] for each in named for name in names_of(each)}
    found: dict[str, dict[str, str]] = {}
    for text in given:
        name, sign, folder = text.partition("=")
        name, at, base = name.rpartition("@")
        if not (sign and at and name and folder) or "/" in name:
            raise InvalidArgumentError(
                f"--adapter: expected NAME@BASE=FOLDER where several models are served, got {text!r}; one that is "
                "merged needs a server of its model alone"
            )
        if base not in bases:
            raise InvalidArgumentError(f"--adapter: expected one of {', '.join(bases)} behind @, got {base!r}")
        if not Path(folder).is_dir():
            raise InvalidArgumentError(f"--adapter: expected a folder behind =, got {folder!r}, which is none")
        if name in bases or any(name in each for each in found.values()):
            raise InvalidArgumentError(f"--adapter: expected names of their own, got {name} twice; rename one")
        found.setdefault(bases[base], {})[name] = folder
    return found


def file_bytes(model: str | None) -> int:
    """Returns the bytes of weights in a folder or file; 0 for what is somewhere else."""
    path = Path(model or "")
    if model is None or not path.exists():
        return 0
    inside = "**/" if is_pipeline_folder(path) else ""  # which has a folder for each part
    endings = ("safetensors", "bin", "gguf")
    files = [path] if path.is_file() else [file for each in endings for file in path.glob(f"{inside}*.{each}")]
    return sum(file.stat().st_size for file in files)
