"""Models by name, folder or object: empty torch modules with their weights as JAX arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytree_registry.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from model_adapters.loading.custom_generate import has_own_generate
    from model_adapters.loading.load_report import LoadReport
    from model_adapters.loading.loaded_model import LoadedModel, require_causal_lm
    from model_adapters.loading.loader import load_model
    from model_adapters.loading.model_source import ModelSource, resolve
    from model_adapters.loading.progress import Progress, RichProgress, SilentProgress
    from model_adapters.loading.short_names import SHORT_NAMES, ShortName

__all__ = [
    "SHORT_NAMES",
    "LoadReport",
    "LoadedModel",
    "ModelSource",
    "Progress",
    "RichProgress",
    "ShortName",
    "SilentProgress",
    "has_own_generate",
    "load_model",
    "require_causal_lm",
    "resolve",
]

# The command line looks names up before torch, jax and transformers are imported.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LoadReport": ".load_report",
        "LoadedModel": ".loaded_model",
        "ModelSource": ".model_source",
        "Progress": ".progress",
        "RichProgress": ".progress",
        "SHORT_NAMES": ".short_names",
        "ShortName": ".short_names",
        "SilentProgress": ".progress",
        "has_own_generate": ".custom_generate",
        "load_model": ".loader",
        "require_causal_lm": ".loaded_model",
        "resolve": ".model_source",
    },
)
