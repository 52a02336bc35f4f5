"""One profile of a process: programs with names of modules, in JAX's profiler."""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import torch

from model_adapters.errors import TorchaxServeError
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.profiling.instructions import instructions_of
from torchax_serve.profiling.profile import Profile
from torchax_serve.profiling.trace import read_trace
from torchax_serve.validation.folders import writable_folder

_RUNNING = threading.Lock()
"""Held while a profile runs: JAX's profiler is one for the process."""


class ProfileRunningError(TorchaxServeError):
    """Another profile of this process runs already."""


class ProfileSession:
    """A profile from `start` to `stop`; as a context manager it yields the `Profile`.

    Args:
        caches: Programs of the model.
        module: The model.
        weights: Its weights by name.
        folder: Where the trace is written; None: into a folder that goes with the profile.

    Attributes:
        caches: Programs of the model; more may be added before `start`.
        profile: What the profile has found, once it has ended.
    """

    def __init__(
        self,
        caches: Collection[ExecutableCache],
        module: torch.nn.Module,
        weights: Weights,
        folder: str | Path | None = None,
    ) -> None:
        self.caches, self._folder = list(caches), folder
        self.profile = Profile(weight_bytes_of(module, weights))

    def start(self) -> Profile:
        """Compiles the programs that ran already with the names of modules, then starts the trace.

        Raises:
            ProfileRunningError: Another profile of this process runs.
            InvalidArgumentError: Nothing can be written to the folder.
            TorchaxServeError: Several hosts share the model.
        """
        if any(cache.launcher is not None for cache in self.caches):
            raise TorchaxServeError(
                "expected a model on one host, got one that several hosts share; profile it on one of them alone"
            )
        if not _RUNNING.acquire(blocking=False):
            raise _running()
        try:
            self._path = self._folder_of_trace()
            if self._folder is None:
                weakref.finalize(self.profile, shutil.rmtree, self._path, ignore_errors=True)
            for cache in self.caches:
                if cache.background is not None:  # until it has a program, a larger one stands in for it
                    cache.background.wait()
                for function in list(cache.functions.values()):
                    function.name_modules()
            for cache in self.caches:
                cache.names_modules = True
            _start_trace(self._path)
        except BaseException:
            self._end()
            raise
        return self.profile

    def stop(self) -> Profile:
        """Ends the trace, writes and reads it."""
        try:
            jax.profiler.stop_trace()
            texts = [
                program.as_text()
                for cache in self.caches
                for function in list(cache.functions.values())
                for program in function.named_programs()
            ]
        finally:
            self._end()
        self.profile.finish(read_trace(self._path, dict(instructions_of(text) for text in texts)))
        return self.profile

    def _folder_of_trace(self) -> Path:
        if self._folder is None:
            return Path(tempfile.mkdtemp(prefix="torchax-serve-profile-"))
        return writable_folder("folder", self._folder)

    def _end(self) -> None:
        for cache in self.caches:
            cache.names_modules = False
        _RUNNING.release()

    def __enter__(self) -> Profile:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
            return
        try:
            jax.profiler.stop_trace()
        finally:
            self._end()


def _running() -> ProfileRunningError:
    return ProfileRunningError("expected no other profile of this process, found one that runs; end it first")


def _start_trace(path: Path) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of Python in the trace would slow down what is measured
    options.host_tracer_level = 2  # instructions on a CPU
    try:
        jax.profiler.start_trace(path, profiler_options=options)
    except RuntimeError as error:  # a script has started one by JAX's own call
        raise _running() from error


def weight_bytes_of(module: torch.nn.Module, weights: Weights) -> Mapping[str, int | None]:
    """Returns, by module, the bytes of its own weights that each device reads in a call.

    They are None for what is not known: rows of a table that are looked up, experts of which tokens choose some.

    Args:
        module: The model.
        weights: Its weights by name.
    """
    found: dict[str, int | None] = {}
    for path, child in module.named_modules():
        own = [f"{path}.{name}" if path else name for name, _ in child.named_parameters(recurse=False)]
        is_partly_read = isinstance(child, torch.nn.Embedding) or any(
            parameter.ndim == 3 and "expert" in f"{path}.{name}"
            for name, parameter in child.named_parameters(recurse=False)
        )
        sizes = [_device_bytes(weights[name]) for name in own if name in weights]
        found[path] = None if is_partly_read or not sizes else sum(sizes)
    return found


def _device_bytes(weight: Any) -> int:
    """Returns the bytes of a weight, as it is stored, on one device."""
    return sum(
        math.prod(part.sharding.shard_shape(part.shape)) * part.dtype.itemsize for part in jax.tree.leaves(weight)
    )
