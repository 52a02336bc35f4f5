"""Packages made importable without what their ``__init__`` imports."""

import importlib.util
import sys
import types


def without_imports(*packages):
    """Makes packages importable without what they import first of all."""
    for name in packages:
        (place,) = importlib.util.find_spec(name).submodule_search_locations
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [place]
