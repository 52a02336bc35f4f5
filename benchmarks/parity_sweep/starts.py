"""Starts of a model in a folder, each in a process that finds what another left."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model_adapters.loading import LoadedModel
from model_adapters.loading.model_source import ModelSource, parse_name
from parity_sweep.check_engine import on_engine
from parity_sweep.tiny.media_prompts import Inputs
from parity_sweep.tiny.models import NUM_NEW
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.compilation.xla_cache import enable_compile_cache
from torchax_serve.engine.options import EngineOptions
from torchax_serve.entrypoints.load import load_checkpoint, load_served_model
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.parity.result import STATIC, ProbeResults, error_line
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.start.record import start_folder
from torchax_serve.start.stored_model import stored_model

INPUTS, ANSWER = "start-inputs.pickle", "start-answer.json"
"""Files beside the model's folder: what is asked of it, and what a start has answered."""
LIMIT_S = 300
"""Seconds after which a start is ended."""
_ARGUMENTS = {"dtype": "auto"}
"""Arguments of loading, which the name of a start record depends on."""
_WRITERS = ("keep-program", "record-start")
"""Names of threads that write what a later start reads."""


@dataclasses.dataclass(frozen=True)
class Start:
    """What a start has answered.

    Attributes:
        tokens: New tokens by input.
        by_record: Whether it was a start from a record, without PyTorch.
        num_read: Programs that came from disk.
        num_traced: Programs that were traced.
        executor: Executor of the engine.
    """

    tokens: list[list[int]]
    by_record: bool
    num_read: int
    num_traced: int
    executor: str


def start(folder: Path, inputs: list[Inputs], engine: EngineOptions) -> Start:
    """Serves the model in `folder` as `serve` does, and answers one input after the other.

    It returns when all is written that a later start reads.

    Args:
        folder: Of the model.
        inputs: Arguments of ``generate`` for each answer.
        engine: Options of the engine.

    Raises:
        RuntimeError: it has no answer.
    """
    enable_compile_cache()
    source = parse_name(folder)
    assert isinstance(source, ModelSource)
    folder_of = functools.partial(start_folder, arguments=_ARGUMENTS)

    def load() -> LoadedModel:
        return load_checkpoint(folder, None, True, dict(_ARGUMENTS))

    def first() -> ServedModel:
        return load_served_model(folder, engine, None, None, True, dict(_ARGUMENTS), folder_of)

    record = folder_of(source)
    stored = None if record is None else stored_model(source, record, load, lambda: True)
    with first() if stored is None else ServedModel(stored, engine) as served:
        tokens, executor = [], ""
        for one in inputs:
            found, executor = _answer(served, one)
            tokens.append(found)
        executables = _executables_of(served)
        if executables.background is not None:
            executables.background.wait()
        for thread in threading.enumerate():
            if thread.name in _WRITERS:
                thread.join()
        num_traced = sum(executables.num_traces.values())
        return Start(tokens, stored is not None, executables.num_loaded, num_traced, executor)


def _answer(served: Any, one: Inputs) -> tuple[list[int], str]:
    """Returns the new tokens of an input, and the executor.

    Raises:
        RuntimeError: there are none.
    """
    if set(one) <= {"input_ids", "attention_mask"} and not served.text_facts.has_encoder:
        params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0, ignore_eos=True)
        tokens = list(served.iter_tokens(one["input_ids"][0].tolist(), params=params))
        return tokens, "per-sequence" if "not packed" in served.engine.description else "packed"
    tried = ProbeResults()
    executor, reason, answers = on_engine(served, [one], STATIC, tried)
    if tried.errors or not answers:
        raise RuntimeError("; ".join(tried.errors) or reason or "no answer")
    return answers[0], executor


def _executables_of(served: ServedModel) -> ExecutableCache:
    """Returns the programs of the model that answers."""
    if (found := served._executables) is not None:
        return found
    model = served.torch_model if served.torch_model.can_generate() else served._generator()
    executables: ExecutableCache = model._jax_runtime.steps.executables
    return executables


class StartProcesses:
    """Starts models in processes of their own, each of which has nothing of another.

    Their parent imports the libraries once and forks.
    """

    def __init__(self) -> None:
        path = os.pathsep.join(each for each in sys.path if each)
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._parent = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **threads},
        )

    def start(self, folder: Path, inputs: list[Inputs], engine: EngineOptions) -> Start:
        """Works as `start`, in a new process.

        Raises:
            RuntimeError: it ended otherwise than well, or has no answer.
        """
        assert self._parent.stdin is not None and self._parent.stdout is not None
        answer = folder.parent / ANSWER
        answer.unlink(missing_ok=True)
        (folder.parent / INPUTS).write_bytes(pickle.dumps((inputs, engine)))
        print(folder, file=self._parent.stdin, flush=True)
        line = self._parent.stdout.readline()
        if not line:
            raise RuntimeError(f"the processes of starts ended with status {self._parent.wait()}")
        if status := int(line):
            raise RuntimeError(f"the start ended with status {status}")
        said = json.loads(answer.read_text())
        if "error" in said:
            raise RuntimeError(said["error"])
        return Start(**said)

    def close(self) -> None:
        """Ends the parent."""
        with contextlib.suppress(BrokenPipeError):
            self._parent.communicate(timeout=60)


@contextlib.contextmanager
def start_processes() -> Iterator[StartProcesses]:
    """Yields `StartProcesses`, which are closed at the end."""
    starts = StartProcesses()
    try:
        yield starts
    finally:
        starts.close()


def _serve_in_forks() -> None:
    """Forks for each folder on standard input; prints the exit status of each process."""
    statuses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no status
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            signal.alarm(LIMIT_S)
            statuses.close()
            _answer_in(Path(line.rstrip("\n")))
            return
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=statuses, flush=True)


def _answer_in(folder: Path) -> None:
    inputs, engine = pickle.loads((folder.parent / INPUTS).read_bytes())
    try:
        said = dataclasses.asdict(start(folder, inputs, engine))
    except Exception as error:
        traceback.print_exc()
        said = {"error": error_line(error)}
    (folder.parent / ANSWER).write_text(json.dumps(said))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    _serve_in_forks()
