"""Compilation ahead of time, for accelerators that need not be there; collected only where the folder is named.

A plain ``pytest`` leaves the folder out: the compilers are large, and no dependency of the project.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(config):
    named = (Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args)
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Of the quickest settings for the CPU some are settings of accelerators' compilers, too."""
    config.option.as_served = True
