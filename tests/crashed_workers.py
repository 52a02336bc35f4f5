"""A process of tests that has crashed ends the run with status 3: tests behind it have not run.

pytest-xdist itself ends with 1, as if tests had failed alone.
"""

import pytest

_CRASHED = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if error:
        _CRASHED.append(node)


def pytest_sessionfinish(session):
    if _CRASHED:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
