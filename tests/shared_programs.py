"""One folder of compiled programs for a run of the tests, which all its processes share.

Most tests serve one of a few tiny models, each time an object of its own, whose programs are made anew: nobody can know
what a script has done to an object. Here two objects that `model_identity` describes alike share programs, as two
starts of one folder do. A test that replaces functions (`monkeypatch`) or is marked `own_programs`, such as one that
counts what is traced, takes none and leaves none.

The folder is new in each run, so that no program is older than the source it was made from. `--own-programs` does
without it, and so does `--as-served`.
"""

import collections
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

VARIABLE = "TORCHAX_SERVE_TESTS_PROGRAMS"
MAX_IN_MEMORY = 300
"""Programs that a process holds when their engines are gone; each takes several memory maps."""

_running = []
_in_memory = collections.OrderedDict()


def pytest_configure(config):
    """Makes the folder of a run; the processes of the run inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ.pop(VARIABLE, None)  # of a run that has started this one
        if not any(config.getoption(name, False) for name in ("--own-programs", "--as-served")):
            os.environ[VARIABLE] = tempfile.mkdtemp(prefix="torchax-serve-programs-")


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput") and (folder := os.environ.pop(VARIABLE, None)):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    _running[:] = [item]
    try:
        return (yield)
    finally:
        _running.clear()


def is_shared_now():
    """Returns whether the test that runs, if any, may use programs of others and leave its own to them."""
    return not any("monkeypatch" in item.fixturenames or item.get_closest_marker("own_programs") for item in _running)


def let_go():
    """Drops the programs in memory, and returns their files."""
    files = list(_in_memory)
    _in_memory.clear()
    return files


def _hold(file, found):
    _in_memory[file] = found
    while len(_in_memory) > MAX_IN_MEMORY:
        _in_memory.popitem(last=False)


@pytest.fixture(autouse=True, scope="session")
def programs_are_shared():
    """Lets models that are objects find programs that an equal one has left in the folder of this run."""
    folder = os.environ.get(VARIABLE)
    if folder is None or "torch" not in sys.modules:  # no test of this run makes a model
        yield
        return
    from model_identity import identity_of

    from torchax_serve.entrypoints import draft, torch_model
    from torchax_serve.sampling import sampler

    own, (held, shared) = torch_model.programs_of, _classes()

    def programs_of(loaded):
        identity = identity_of(loaded) if is_shared_now() else None
        return own(loaded) if identity is None else shared(Path(folder), identity)

    with pytest.MonkeyPatch.context() as patch:
        for module in (draft, torch_model):
            patch.setattr(module, "programs_of", programs_of)
        patch.setattr(sampler, "ExecutableCache", held)
        yield
    let_go()


def _classes():
    from torchax_serve.compilation.executable_cache import ExecutableCache

    class HeldPrograms(ExecutableCache):
        """Programs that lie in a folder; those that this process has made or read before come from its memory."""

        def read(self, path):
            found = _in_memory.get(path)
            if found is not None:
                self.num_loaded += 1
            elif (found := super().read(path)) is not None:
                _hold(path, found)
            return found

        def write(self, path, program, facts):
            _hold(path, (program, facts))
            super().write(path, program, facts)

    class SharedPrograms(HeldPrograms):
        """Programs of equal models, in the folder of this run."""

        def path_of(self, name, signature):
            return super().path_of(name, signature) if is_shared_now() else None

        def write(self, path, program, facts):
            if is_shared_now():  # the trace of an earlier test may end in one that replaces functions
                super().write(path, program, facts)

        def memoize(self, name, described, compute):
            return super().memoize(name, described, compute) if is_shared_now() else compute()

    return HeldPrograms, SharedPrograms
