"""Digests of the lowered programs of tiny models: where they are equal, a change has not touched the device's part.

``python tests/unchanged/step_digests.py write`` writes those of all models to `step_digests.json`, ``check`` compares
with it; a file may follow. *Planned* are the steps that `plan` traces (`abstract_steps`), which the suite compares,
too; *programs* are what a warm-up compiles (`compile_tasks`) and some requests need. A change that is meant to change
programs writes the file anew.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import re
import sys
import tempfile
import warnings
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))

import recorded
from golden_models import MODELS, served

from torchax_serve import SamplingParams
from torchax_serve.compilation.executable_cache import ExecutableCache

FILE = recorded.FOLDER / "step_digests.json"
PREFILL_LENS = (5, 16)


class Lowered:
    """A lowered program that is compiled when it is called: `compile_tasks` calls few, and reads shapes of results."""

    def __init__(self, out_info, compile):
        self.out_info, self._compile, self._program = out_info, compile, None

    def __call__(self, *args):
        self._program = self._program or self._compile()
        return self._program(*args)


class Recorder:
    """Digests of the programs that JAX lowers, by their names."""

    def __init__(self):
        self.digests, self.compiles = collections.defaultdict(set), True

    @contextlib.contextmanager
    def recording(self):
        """Records what is lowered in the block, also by other threads; unless `compiles` it is compiled when called."""
        compile_lowered, read = jax.stages.Lowered.compile, ExecutableCache.read

        def compile(lowered, *args, **kwargs):
            self.add(lowered.as_text())
            compile_now = functools.partial(compile_lowered, lowered, *args, **kwargs)
            return compile_now() if self.compiles else Lowered(lowered.out_info, compile_now)

        jax.stages.Lowered.compile, ExecutableCache.read = compile, lambda cache, path: None  # all are lowered
        try:
            yield
        finally:
            jax.stages.Lowered.compile, ExecutableCache.read = compile_lowered, read

    def add(self, text):
        name = re.sub(r"_[0-9a-f]{40}$", "", _NAME.search(text)[1])  # names of files have a digest of our source
        self.digests[name].add(digest(text))

    def result(self):
        return {name: sorted(found) for name, found in sorted(self.digests.items())}


_NAME, _RESULT = re.compile(r"module @(\w+)"), re.compile(r'jax\.result_info = "[^"]*"')


def digest(text):
    """A digest of StableHLO without the names of its function and of fields of results, which a rename may change."""
    return hashlib.sha256(_RESULT.sub("", _NAME.sub("module", text)).encode()).hexdigest()[:16]


def planned(model):
    """Digests of the steps of a served model that `plan` traces."""
    found = {}
    for step in model.engine._runner._executor.abstract_steps(PREFILL_LENS):
        program = jax.jit(step.function, donate_argnums=tuple(1 + index for index in step.donated))  # behind weights
        found[f"{step.name} {step.num_tokens}"] = digest(program.lower(model.runtime.weights, *step.args).as_text())
    return found


def programs(model, *, takes_text=True):
    """Digests of all programs of a served model; nothing may have been compiled for it before."""
    recorder = Recorder()
    with recorder.recording():
        if takes_text:
            model.generate_batch([[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=4, repetition_penalty=1.1))
        recorder.compiles = False
        for task in model.engine._runner.compile_tasks():
            task.compile()
    return recorder.result()


def all_digests(names=()):
    """Both kinds of all models, or of those whose names have a part of `names`."""
    found = {"planned": {}, "programs": {}}
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODELS:
            if names and not any(each in name for each in names):
                continue
            with served(name, Path(root)) as model:
                found["planned"][name] = planned(model)
                found["programs"][name] = programs(model, takes_text=MODELS[name].takes_text)
            print(f"{name}: {sum(map(len, found['programs'][name].values()))} programs", file=sys.stderr)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of models")
    arguments = parser.parse_args()
    found = all_digests(arguments.only)
    if arguments.action == "write":
        recorded.write(arguments.file, found)
        return
    wanted, is_same = recorded.read(arguments.file)
    if not is_same:
        sys.exit(f"{arguments.file} is of other versions; compare with a commit (tests/unchanged/compare.py)")
    wanted = {kind: {name: models[name] for name in found[kind]} for kind, models in wanted.items()}
    places = list(recorded.differences(wanted, found))
    print(*places, f"{len(places)} differences", sep="\n")
    sys.exit(bool(places))


if __name__ == "__main__":
    main()
