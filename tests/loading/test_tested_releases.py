"""Newer releases of the libraries: noted once in the log, by the bounds that the suite itself is installed with."""

import importlib.metadata
import logging
import platform
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from model_adapters import tested_releases

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def versions(monkeypatch):
    """Versions that the packages and Python seem to have: old ones, and what a test says."""
    tested_releases.log_newer_releases.cache_clear()
    found = dict.fromkeys(tested_releases.NOT_TESTED_FROM, "0.1")
    monkeypatch.setattr(importlib.metadata, "version", found.__getitem__)
    monkeypatch.setattr(platform, "python_version", lambda: found["python"])
    yield found
    tested_releases.log_newer_releases.cache_clear()


@pytest.mark.parametrize(
    ("package", "version", "is_newer"),
    [
        ("python", "3.11.7", False),
        ("python", "3.99.0", True),
        ("torch", "2.13.1+cpu", False),
        ("torch", "2.99.0", True),
        ("torch", "3.0.0a1", True),
        ("jax", "0.9.3", False),
        ("jax", "0.100.0.1", True),
        ("transformers", "5.17.0", False),
        ("transformers", "6.0.0", True),
    ],
)
def test_what_is_newer_is_in_the_log_once_and_no_warning(versions, caplog, package, version, is_newer):
    versions[package] = version
    with caplog.at_level(logging.WARNING, "torchax_serve"):
        tested_releases.log_newer_releases()
        tested_releases.log_newer_releases()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == is_newer
    assert all(f"{package} {version} (tested below " in line for line in said)


def test_the_suite_is_installed_with_releases_that_count_as_tested():
    bounds = {}
    for line in PROJECT["optional-dependencies"]["dev"]:
        requirement = Requirement(line)
        bounds[requirement.name] = {each.version for each in requirement.specifier if each.operator == "<"}
    for package in ("torch", "jax", "transformers"):
        (limit,) = bounds[package]
        numbers = tested_releases._numbers
        assert numbers(limit) <= numbers(tested_releases.NOT_TESTED_FROM[package])


def test_nothing_keeps_an_installation_from_newer_releases_but_torchax():
    """Its table of operators is replaced in part; torch is bounded on Pythons of the suite. pyproject.toml says so."""
    bounded = {
        each.name: each.marker for each in map(Requirement, PROJECT["dependencies"]) if "<" in str(each.specifier)
    }
    assert set(bounded) == {"torch", "torchax"}
    assert not bounded["torch"].evaluate({"python_version": "3.13"})
    assert PROJECT["requires-python"] == ">=3.11"
