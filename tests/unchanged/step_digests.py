"""Writes a digest of each lowered program of tiny models, or compares them with those written before.

``python tests/unchanged/step_digests.py FILE`` writes; with ``--check`` it compares. The programs are those that a
warm-up compiles (`compile_tasks`), those that `plan` traces (`abstract_steps`), and those of some requests. Equal
StableHLO means that a change has not touched the device's part.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))

from golden_models import MODELS, served

from torchax_serve import SamplingParams
from torchax_serve.compilation.executable_cache import ExecutableCache

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
        text = re.sub(r"(module @\w+?)_[0-9a-f]{40}", r"\1", text)  # names of files have a digest of our source
        name, *_ = re.findall(r"module @(\w+)", text) or ["?"]
        self.digests[name].add(hashlib.sha256(text.encode()).hexdigest()[:16])

    def result(self):
        return {name: sorted(found) for name, found in sorted(self.digests.items())}


def digests_of(name, root):
    """Digests of the programs of the model `name`."""
    recorder = Recorder()
    with served(name, root) as model, recorder.recording():
        runner = model.engine._runner
        model.generate_batch([[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=4, repetition_penalty=1.1))
        for task in runner._executor.abstract_steps(PREFILL_LENS):
            lowered = jax.jit(task.function, donate_argnums=task.donated).lower(model._runtimes[0].weights, *task.args)
            recorder.add(lowered.as_text())
        recorder.compiles = False
        for task in runner.compile_tasks():
            task.compile()
    return recorder.result()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the file in place of writing it")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets decides about the order of some arguments
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: digests_of(name, Path(root)) for name in MODELS}
    number = sum(len(each) for programs in found.values() for each in programs.values())
    if not arguments.check:
        arguments.file.write_text(json.dumps(found, indent=1))
        print(f"{number} digests written")
        return
    wanted = json.loads(arguments.file.read_text())
    different = [(m, p) for m in wanted for p in {**wanted[m], **found[m]} if wanted[m].get(p) != found[m].get(p)]
    print(*different, sep="\n")
    print(f"{number} digests, {len(different)} programs differ")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
