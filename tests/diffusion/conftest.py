"""Pipelines of diffusers; collected only where the folder is named, since diffusers is an extra."""

import pytest


@pytest.fixture(autouse=True)
def keep_libraries_quiet(monkeypatch):
    """The command line sets levels of logging of libraries for its process."""
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
