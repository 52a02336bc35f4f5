"""What holds for all tests."""

import gc
import signal

import jax
import pytest
from hypothesis import HealthCheck, settings

# Machines are slow at times: an example that takes long is no fault. A run that fails can be run again.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A shell's background job ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go():
    """A compiled program takes memory maps, of which a process may have some 65,000: modules leave none behind."""
    yield
    gc.collect()
    jax.clear_caches()
    gc.collect()
