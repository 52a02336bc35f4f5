"""The look-alike of the hub that a file's tests share."""

import hub_lookalike
import pytest


@pytest.fixture(scope="module")
def server():
    with hub_lookalike.serving() as hub:
        yield hub
