"""Compilation ahead of time, for accelerators that need not be there; collected only where the folder is named.

A plain ``pytest`` leaves the folder out: the compilers are large, and no dependency of the project.
"""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Of the quickest settings for the CPU some are settings of accelerators' compilers, too."""
    config.option.as_served = True
