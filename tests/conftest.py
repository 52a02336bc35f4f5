"""What holds for all tests."""

import gc
import os
import signal
from pathlib import Path

# PyTorch's threads wait for each other by spinning, which took a third of the processor's time beside other processes.
# Before its import; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import pytest
import shared_programs
from crashed_workers import pytest_sessionfinish, pytest_testnodedown  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_programs import programs_are_shared, pytest_runtest_protocol, pytest_unconfigure  # noqa: F401
from thorough import is_in_part, part

from parity_sweep.sweep import QUICK_COMPILATION

# Machines are slow at times: an example that takes long is no fault. A run that fails can be run again.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@given(st.none())
def make_hypothesis_random(_):
    """Has hypothesis make its source of random numbers, whose owner it does not find once that is frozen."""


# A shell's background job ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What needs no compiler and no model: `pytest -m fast`.
FAST = (
    "distributed/test_http_requests",
    "distributed/test_message_codec",
    "distributed/test_prefix_affinity",
    "docs/test_ci_run",
    "docs/test_document_links",
    "generation/test_routing",
    "planning/test_shares",
    "sampling/test_request",
    "scheduler/test_scheduler_bad_input",
    "scheduler/test_scheduler_pages",
    "scheduler/test_scheduler_policy",
    "scheduler/test_scheduler_prefill_budget",
    "scheduler/test_scheduler_speculation",
    "scheduler/test_scheduler_steady_decode",
    "test_repo_shape",
    "test_sharding_rules",
    "text/test_text_detokenizer",
)


# Folders that need what is fetched or installed for them, or half an hour: collected only where they are named.
ONLY_NAMED = {
    Path(__file__).parent / folder
    for folder in (
        "agents",
        "aot",
        "bundles",
        "chart",
        "diffusion",
        "format_tools",
        "page",
        "real",
        "replicas",
        "sharding/every_mesh",
        "tunix",
    )
}


def pytest_ignore_collect(collection_path, config):
    """Leaves out a folder of `ONLY_NAMED`, unless it or something in it is named."""
    if collection_path not in ONLY_NAMED:
        return None
    named = (Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args)
    return None if any(path == collection_path or collection_path in path.parents for path in named) else True


def pytest_collection_modifyitems(config, items):
    """Marks the tests of `FAST` modules, and leaves out those marked as thorough, or all others with `--thorough`."""
    for item in items:
        if item.nodeid.partition("::")[0].removesuffix(".py").removeprefix("tests/") in FAST:
            item.add_marker(pytest.mark.fast)
    if any("::" in each for each in config.args):  # tests that are named run
        return
    is_thorough, chosen = config.getoption("--thorough"), config.getoption("--part")

    def is_left_out(item):
        is_other_kind = (item.get_closest_marker("thorough") is not None) != is_thorough
        return is_other_kind or not is_in_part(item.nodeid, *chosen)

    kept = [item for item in items if not is_left_out(item)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
        items[:] = kept


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run the tests marked as thorough, and only those")
    parser.addoption("--part", type=part, default=(1, 1), metavar="N/M", help="run one of M parts of the tests")
    parser.addoption("--own-programs", action="store_true", help="share no compiled programs between tests")
    parser.addoption("--as-served", action="store_true", help="compile for the CPU as models are that are served")


def pytest_configure(config):
    """A test's program runs for moments; with XLA's and LLVM's own settings tests would mostly wait for compilers."""
    # XLA's threads on the CPU: each warp group of an interpreted GPU kernel blocks one, and so does their caller.
    os.environ.setdefault("NPROC", str(max(5, os.cpu_count() or 1)))
    given = os.environ.get("XLA_FLAGS", "")
    if not config.getoption("--as-served") and QUICK_COMPILATION not in given:
        # XLA has not read them yet; processes that tests start inherit them.
        os.environ["XLA_FLAGS"] = f"{QUICK_COMPILATION} {given}".rstrip()
    shared_programs.pytest_configure(config)


MAX_MAPS = 10_000
"""Memory maps of this process with which programs are let go; Linux allows some 65,000, and a program takes several."""


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go():
    """Lets go of what a module leaves: models, and with many memory maps JAX's programs, which others may use again."""
    if gc.get_freeze_count() == 0:  # half a million objects of the libraries, which each collection would visit
        make_hypothesis_random()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)  # tracing makes millions of objects, few of which are garbage in cycles
    yield
    gc.collect()
    if num_maps() > MAX_MAPS:
        shared_programs.let_go()
        jax.clear_caches()
        gc.collect()


def num_maps():
    """Memory maps of this process; 0 on systems without a list of them."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0
