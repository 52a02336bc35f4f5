"""Packages made importable without what their ``__init__`` imports."""

import importlib.util
import sys
import types

import pytest


def without_imports(*packages):
    """Makes packages importable without what they import first of all; skips a module whose tool is not there."""
    for name in packages:
        if (spec := importlib.util.find_spec(name)) is None:
            pytest.skip(f"{name} is not installed; conftest.py says how", allow_module_level=True)
        (place,) = spec.submodule_search_locations
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [place]
