"""What a single architecture needs and no general means gives: one file each, with its reason.

A quirk is a module named after the folder of transformers' modeling code that it is for, or after what several have in
common (`SAME_AS`). It may have:

* ``METHODS``: functions by ``Class.method``, which stand in the place of those methods while a model is traced, and
  are written in torch as these are. Nothing is replaced outside of a trace, and nothing in another architecture.
* ``FUNCTIONS``: the same for functions of its modeling file, by name; one that a release does not have is left out.
* ``RIGHT_ALIGNED_CACHE = True``: the code counts from the end of the keys, so the
  cache must be right-aligned (`model_adapters.caches.layers`).
* ``UNMASKED_SLIDING_CACHE = True``: its masks show all tokens, and what its cache has kept of them decides what is
  seen.
* ``TOKEN_BY_TOKEN``: architectures where tokens of one forward see those behind them, so that an answer goes on
  token by token alone.
* ``IGNORED_ARGUMENTS``: arguments that the forward takes and never reads, so that their shapes need not be compiled
  for.
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

from model_adapters.bridge.views import in_torch_mode
from model_adapters.program.trace_context import replaced_methods

_MODELS = "transformers.models."
SAME_AS = {
    "kyutai_speech_to_text": "moshi",
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), "idefics"),
    **dict.fromkeys(("gpt_neo", "mpt"), "key_count"),
    **dict.fromkeys(("fsmt", "led"), "missing_step_mask"),
    **dict.fromkeys(("falcon_mamba", "jamba", "zamba"), "mamba"),
}
"""Architectures whose code is another's, copied, or needs the same as others': the quirk that is theirs as well."""


@functools.cache
def names() -> tuple[str, ...]:
    """Quirks, by the name of an architecture's folder in transformers, or as `SAME_AS` has it."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@functools.cache
def _replaced(architecture: str) -> dict[str, Callable[..., Any]]:
    return getattr(_module(architecture), "METHODS", {})


def _module(architecture: str) -> types.ModuleType | None:
    return importlib.import_module(f"{__name__}.{architecture}") if architecture in names() else None


def needs_right_aligned_cache(module: torch.nn.Module) -> bool:
    """Whether a quirk says that the cache of `module` must lean."""
    return bool(getattr(_module(_architecture(module)), "RIGHT_ALIGNED_CACHE", False))


def sliding_cache_unmasked(module: torch.nn.Module) -> bool:
    """Whether a quirk says that what the cache of `module` has forgotten is not masked otherwise."""
    return bool(getattr(_module(_architecture(module)), "UNMASKED_SLIDING_CACHE", False))


def needs_token_by_token(module: torch.nn.Module) -> bool:
    """Whether a quirk says that tokens of one forward see those behind them."""
    return _folder(module) in getattr(_module(_architecture(module)), "TOKEN_BY_TOKEN", ())


def ignored_arguments(module: torch.nn.Module) -> frozenset[str]:
    """Arguments that the forward of `module` does not read."""
    return frozenset(getattr(_module(_architecture(module)), "IGNORED_ARGUMENTS", ()))


def _folder(module: torch.nn.Module) -> str:
    path = next((c.__module__ for c in type(module).__mro__ if c.__module__.startswith(_MODELS)), "")
    return path.removeprefix(_MODELS).partition(".")[0]


def _architecture(module: torch.nn.Module) -> str:
    name = _folder(module)
    return SAME_AS.get(name, name)


def apply_methods(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """The methods of quirks stand in the place of those of `module` and its parts inside, and their functions."""
    for child in module.modules():
        _install_functions(type(child).__module__, _architecture(child))
    return replaced_methods(
        (child, method, function)
        for child in module.modules()
        for name, function in _replaced(_architecture(child)).items()
        for class_name, _, method in (name.partition("."),)
        if any(base.__name__ == class_name for base in type(child).__mro__)
    )


@functools.cache
def _install_functions(file: str, architecture: str) -> None:
    """Gives a modeling file functions that call the quirk's in a trace, and the original's everywhere else."""
    for name, function in getattr(_module(architecture), "FUNCTIONS", {}).items():
        if (original := vars(sys.modules[file]).get(name)) is not None:
            setattr(sys.modules[file], name, _by_mode(function, original))


def _by_mode(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if in_torch_mode() else original)(*args, **kwargs)

    return chosen
