"""Libraries whose modules are compared: the packages to install for each, and its cases by name."""

from __future__ import annotations

import importlib

from module_parity.compare import Case

LIBRARIES = {
    "torch.nn": "torch_layers",
    "torch-geometric": "geometric_layers",
    "torchaudio": "sound_models",
    "fair-esm": "other_models:of_esm",
    "x-transformers": "other_models:of_x_transformers",
    "vit-pytorch": "vit_pytorch_models",
    "chronos-forecasting": "other_models:of_chronos",
    "timesfm": "other_models:of_timesfm",
    "segmentation-models-pytorch": "other_models:of_segmentation",
    "tabpfn": "table_and_robot_models:of_tabpfn",
    "lerobot": "table_and_robot_models:of_lerobot",
    "timm": "timm_models",
    "torchvision": "torchvision_models",
}
"""Library by the name of its package, and the module here with its cases, and the function if it is not `cases`."""
PACKAGES = tuple(LIBRARIES)[1:]
"""Packages to install with ``--no-deps`` beside this one; einops and what they ask for themselves besides."""


def library_of(name: str) -> str:
    """Library of a case."""
    return name.split(" ", 1)[0]


def cases_of(library: str) -> dict[str, Case]:
    """Cases of a library by name, which begins with it.

    Raises:
        ImportError: the library is not installed.
    """
    module, _, function = LIBRARIES[library].partition(":")
    cases = getattr(importlib.import_module(f"module_parity.{module}"), function or "cases")()
    return {f"{library} {name}": case for name, case in cases.items()}
