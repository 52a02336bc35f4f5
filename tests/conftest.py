"""What holds for all tests."""

import gc

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go():
    """A compiled program takes memory maps, of which a process may have some 65,000: modules leave none behind."""
    yield
    gc.collect()
    jax.clear_caches()
    gc.collect()
