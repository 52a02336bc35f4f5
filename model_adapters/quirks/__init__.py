"""Exceptions for architectures of transformers: one file each, with its reason.

A file is named after the folder of transformers' modeling code that it is for, or after what several have in common
(`SAME_AS`), and defines `QUIRK`, whose fields `model_adapters.quirks.quirk.Quirk` lists. Files without a `QUIRK` hold
functions that several quirks use. General rules are in other packages and ask `of` or `of_type` for exceptions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.auto.configuration_auto import model_type_to_module_name

from model_adapters.bridge.views import in_torch_mode
from model_adapters.once import once
from model_adapters.program.trace_context import replaced_methods
from model_adapters.quirks.quirk import Quirk

_MODELS = "transformers.models."
_NONE = Quirk()
SAME_AS = {
    "seamless_m4t_v2": "seamless_m4t",
    **dict.fromkeys(("musicgen", "musicgen_melody"), "codebook_rows"),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), "idefics"),
    **dict.fromkeys(("gpt_neo", "mpt"), "key_count"),
    **dict.fromkeys(("canary", "cohere_asr", "moonshine_streaming"), "moonshine"),
    **dict.fromkeys(("falcon_mamba", "jamba"), "mamba"),
    "gemma4_unified": "gemma4",
    "inkling2_loop": "inkling2",
}
"""The file of each architecture whose code is a copy of another's, or that has the same needs as others."""


@functools.cache
def names() -> tuple[str, ...]:
    """Returns the names of the files of this package."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def of(module: torch.nn.Module) -> Quirk:
    """Returns the quirk of the architecture that the class of `module` is from.

    It has no fields if there is none.
    """
    return _of_folder(_folder(module))


def of_type(model_type: str) -> Quirk:
    """Returns the quirk of a ``model_type`` of transformers.

    It has no fields if there is none.
    """
    return _of_folder(model_type_to_module_name(model_type))


def file_of_type(model_type: str) -> types.ModuleType | None:
    """Returns the file with the quirk of a ``model_type``; None if there is none.

    The ``model_type`` is one of transformers.
    """
    return _file(model_type_to_module_name(model_type))


def architectures_of(name: str) -> frozenset[str]:
    """Returns the folders of transformers whose quirk is in the file `name`.

    Included are those whose quirk uses what is in that file.
    """
    files = {name}
    for other in names():
        values = vars(importlib.import_module(f"{__name__}.{other}")).values()
        if any(getattr(value, "__module__", None) == f"{__name__}.{name}" for value in values if callable(value)):
            files.add(other)
    return frozenset({*files, *(folder for folder, file in SAME_AS.items() if file in files)})


@functools.cache
def _of_folder(folder: str) -> Quirk:
    quirk: Quirk = getattr(_file(folder), "QUIRK", _NONE)
    return quirk


def _file(folder: str) -> types.ModuleType | None:
    name = SAME_AS.get(folder, folder)
    return importlib.import_module(f"{__name__}.{name}") if name in names() else None


def _folder(module: torch.nn.Module) -> str:
    return _folder_of(type(module))


def _folder_of(kind: type[torch.nn.Module]) -> str:
    path = next((c.__module__ for c in kind.__mro__ if c.__module__.startswith(_MODELS)), "")
    return path.removeprefix(_MODELS).partition(".")[0]


def install_functions(module: torch.nn.Module) -> None:
    """Gives the modeling files of `module` and its parts the functions of quirks, for traces."""
    for kind in {type(child) for child in module.modules()}:
        _install_functions(kind.__module__, _folder_of(kind))


def apply_methods(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replaces methods of `module` by those of quirks, inside the context.

    Submodules are included.
    """
    return replaced_methods(
        (child, method, function)
        for child in module.modules()
        for name, function in of(child).methods.items()
        for class_name, _, method in (name.partition("."),)
        if any(base.__name__ == class_name for base in type(child).__mro__)
    )


@once
def _install_functions(file: str, folder: str) -> None:
    """Gives a modeling file functions that call the quirk's in a trace.

    Everywhere else they call the original's.
    """
    for name, function in _of_folder(folder).functions.items():
        if (original := vars(sys.modules[file]).get(name)) is not None:
            setattr(sys.modules[file], name, _by_mode(function, original))


def _by_mode(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if in_torch_mode() else original)(*args, **kwargs)

    return chosen
