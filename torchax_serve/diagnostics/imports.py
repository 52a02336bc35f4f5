"""Finds packages that are installed and cannot be imported.

One that was built for another torch is an example.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator

from torchax_serve.diagnostics.report import Fact

IMPORTED = ("torch", "jax", "transformers")
"""Packages without which nothing runs."""
IMPORTED_IF_INSTALLED = (
    "accelerate",
    "bitsandbytes",
    "diffusers",
    "flash_attn",
    "librosa",
    "peft",
    "PIL",
    "scipy",
    "sklearn",
    "timm",
    "torchao",
    "torchaudio",
    "torchcodec",
    "torchvision",
)
"""Packages that transformers imports where it finds them: one that is broken stops every model."""
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "flash_attn": "flash-attn"}
"""Packages whose module has another name."""


def imports() -> Iterator[Fact]:
    """Yields whether the packages that models need, and those they use if present, import."""
    for name in (*IMPORTED, *IMPORTED_IF_INSTALLED):
        if name in IMPORTED or importlib.util.find_spec(name) is not None:
            yield _import(name)


def _import(name: str) -> Fact:
    package = _DISTRIBUTIONS.get(name, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except Exception as error:  # an extension that was built for another torch raises anything
        reason = " ".join(str(error).split())[:200] or "no message"
        said = f"{package} cannot be imported ({type(error).__name__}: {reason})"
        if name in IMPORTED:
            return Fact(name, f"{said}; install torchax-serve again with pip", "problem")
        return Fact(
            name,
            f"{said}, which stops models that transformers loads: install the release for the torch that is here, or "
            f"pip uninstall {package}",
            "problem",
        )
    return Fact(name, "imported")
