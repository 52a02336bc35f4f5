"""Other projects' programs at a server; collected only where the folder is named, since they have to be fetched.

``python tests/agents/fetch.py``, then ``pytest -n 0 tests/agents``.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


def pytest_ignore_collect(config):
    named = (Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args)
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.fixture(scope="session")
def packages():
    """The folder of npm's packages."""
    from fetch import packages_folder

    return packages_folder()
