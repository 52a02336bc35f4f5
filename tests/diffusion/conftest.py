"""Pipelines of diffusers; collected only where the folder is named, since diffusers is an extra."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(config):
    named = (Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args)
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.fixture(autouse=True)
def keep_libraries_quiet(monkeypatch):
    """The command line sets levels of logging of libraries for its process."""
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)
