"""Models by name, folder or object: empty torch modules with their weights as JAX arrays."""

from model_adapters.loading.loaded import LoadedModel, LoadReport, require_causal_lm
from model_adapters.loading.loader import load_model
from model_adapters.loading.names import SHORT_NAMES, ShortName
from model_adapters.loading.own_generate import has_own_generate
from model_adapters.loading.progress import Progress, RichProgress, SilentProgress
from model_adapters.loading.source import ModelSource, resolve

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
