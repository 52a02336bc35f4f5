"""Other projects' programs at a server; collected only where the folder is named, since they have to be fetched.

``python tests/agents/fetch.py``, then ``pytest -n 0 tests/agents``.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


@pytest.fixture(scope="session")
def packages():
    """The folder of npm's packages."""
    from fetch import packages_folder

    return packages_folder()
