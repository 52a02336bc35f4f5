"""Compiled programs that outlive the process: a second start neither traces nor compiles.

JAX's own persistent cache is looked up by the lowered program, so a model's Python code must be traced to find it.
Here a program is found by what it was made from: the model's configuration and weights' shapes, the source of its
modeling code and of this project, the versions of the libraries, the processor, and the arguments. Any of these that
differs means another entry. The files hold machine code and pickles: they are sealed, and nothing of one is looked at
before its seal is checked (`model_adapters/disk_cache.py`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import jax
from jax.experimental import serialize_executable

from model_adapters.disk_cache import SealedFolder
from model_adapters.jax_settings import jax_promotion, programs_run
from model_adapters.loading.memory import give_back_freed
from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.compilation import gc_pause, jax_cache
from torchax_serve.compilation.background import BackgroundCompiler, check_may_trace, tracing
from torchax_serve.compilation.cache_folders import EVICTOR
from torchax_serve.compilation.compile_lock import CompileLock
from torchax_serve.compilation.environment import devices, environment
from torchax_serve.compilation.launchers import Launcher, MeshExecutable, on_mesh
from torchax_serve.compilation.locations import remove_locations
from torchax_serve.compilation.native_calls import prepare_native_calls
from torchax_serve.compilation.program_signature import ProgramSignature
from torchax_serve.compilation.yielding import WorkQueue

logger = logging.getLogger("torchax_serve")

Value = TypeVar("Value")

_NUMBERS = itertools.count(1)
"""Numbers of programs that have the names of modules: a trace tells programs apart by name."""


_REPORTED: set[tuple[str, str]] = set()
"""Functions and reasons that `_report_slow_attention` has logged."""
_ON_PAGES = ("paged_attention, ", "decode_attention, ")
"""Beginnings of reasons why attention on pages has no kernel. Dense attention has a choice of XLA's operations."""


def _report_slow_attention(name: str, reasons: Sequence[str]) -> None:
    """Logs once why paged attention in the function `name` runs as its reference."""
    for reason in reasons:
        if reason.startswith(_ON_PAGES) and (name, reason) not in _REPORTED:
            _REPORTED.add((name, reason))
            logger.warning("%s: attention goes through XLA's own operations and is slower: %s", name, reason)


class ExportedFunctions(Protocol):
    """Functions of a model that were traced before, such as those of a bundle."""

    def function(self, name: str, args: tuple[Any, ...], spec: Any) -> Callable[..., Any]:
        """Returns ``f(weights, *args)``, the program of function `name` for these arguments.

        Raises:
            TorchaxServeError: it was not traced for them.
        """

    def memoized(self, name: str) -> Any:
        """Returns what `ExecutableCache.memoize` would compute."""


class ExecutableCache:
    """Cache of the compiled programs of one model; in memory alone if `folder` is None.

    With a `mesh` the programs run on all its devices; arguments and results stay where the caller has them, and the
    programs are cached in memory alone. With a `launcher` the mesh has devices of other hosts, which run them too.
    `num_traces` counts traces by function, `num_loaded` programs that came from the folder; `functions` are the cached
    ones, by name. `background` compiles what will be needed; None with a `launcher`. `before_trace` is called before
    each trace, while no lock is held that a trace holds: it may load what the trace needs. While `names_modules` is
    set, calls run programs whose instructions have the names of modules, for profiles; these are in memory alone.
    `exported` has the functions that were traced before, in place of tracing.
    """

    def __init__(
        self,
        folder: Path | None = None,
        identity: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
        launcher: Launcher | None = None,
        before_trace: Callable[[], object] = lambda: None,
        exported: ExportedFunctions | None = None,
    ) -> None:
        self.before_trace, self.exported = before_trace, exported
        self.folder = folder if identity is not None and mesh is None else None
        self._files = None if self.folder is None else SealedFolder(self.folder)
        self.mesh, self.launcher = mesh, launcher
        self.functions: weakref.WeakValueDictionary[str, CachedFunction] = weakref.WeakValueDictionary()
        self.identity = identity
        self.num_traces: collections.Counter[str] = collections.Counter()
        self.num_loaded = 0
        self.names_modules = False
        self._writers = WorkQueue("keep-program")
        # Programs of several hosts are compiled by all of them, in one order, which the engine's thread decides.
        self.background = BackgroundCompiler() if launcher is None else None

    def path_of(self, name: str, signature: ProgramSignature) -> Path | None:
        """Returns the file of a program; None if it is not stored."""
        described = f"{signature.tree} {signature.leaves} {signature.spec!r}"
        if self.folder is None or signature.names_modules or " at 0x" in described or registry.is_overridden():
            return None
        return self._file_of(name, described)

    def _file_of(self, name: str, described: str) -> Path:
        assert self.folder is not None
        digest = hashlib.sha256(f"{self.identity}\n{environment()}\n{name}\n{described}".encode()).hexdigest()
        return self.folder / f"{name}-{digest[:40]}"

    def read(self, path: Path) -> tuple[Any, dict[str, Any]] | None:
        """Reads the program in `path` and its facts; None if there is no usable one."""
        assert self._files is not None
        content = self._files.read(path.name)
        if content is None:
            return None
        try:
            code, in_tree, out_tree, facts = pickle.loads(content)
            del content  # a program more while XLA reads it
            prepare_native_calls(code)
            program = serialize_executable.deserialize_and_load(code, in_tree, out_tree, execution_devices=devices())
        except Exception as error:  # intact, and still nothing for this machine: compile as if it were not there
            logger.info("a kept program is not used: %s (%s)", path.name, str(error).splitlines()[0:1])
            self._files.remove(path.name)
            return None
        self.num_loaded += 1
        give_back_freed()  # XLA takes several times what a program has, which would stay with this process
        return program, facts

    def write(self, path: Path, program: Any, facts: dict[str, Any]) -> None:
        """Stores `program` in `path`, in another thread unless the process may end."""

        def run() -> None:
            try:
                self._write(path.name, (*serialize_executable.serialize(program), facts))
            except Exception as error:  # keeping a program costs nothing but time when it fails
                logger.info("a program is not kept: %s", error)

        if self.background is not None and self.background.is_closed:
            run()
            return
        self._writers.add(run)

    def _write(self, name: str, value: Any) -> None:
        assert self._files is not None
        content = pickle.dumps(value)
        self._files.write(name, content)
        EVICTOR.wrote(len(content), self._files)

    def memoize(self, name: str, described: str, compute: Callable[[], Value]) -> Value:
        """Returns the result of `compute`, from disk if it was stored for this model."""
        if self.exported is not None:
            result: Value = self.exported.memoized(name)
            return result
        if self._files is None or registry.is_overridden():
            return compute()
        file = self._file_of(name, described).name
        content = self._files.read(file)
        if content is not None:
            try:
                kept: Value = pickle.loads(content)
                return kept
            except Exception as error:  # intact, and written by a library that has changed
                logger.info("a kept answer is not used: %s (%s)", file, error)
        value = compute()
        with contextlib.suppress(OSError):
            self._write(file, value)
        return value

    def close(self) -> None:
        """Ends the compilation of what is not needed yet."""
        if self.background is not None:
            self.background.close()

    def wait_for_writes(self) -> None:
        """Waits until everything is written."""
        self._writers.wait()


class CachedFunction:
    """A pure function ``f(weights, *args, spec)``, compiled once for each kind of arguments.

    Args:
        cache: where programs are kept.
        name: of the function in files, counters and profiles.
        function: traced with `spec` as a static keyword argument.
        donate: names of the arguments whose buffers are donated, each with the position of its new value in the
            result; None where that is all of the result.
        facts: called after a trace; its result is stored with the program.
        restore_facts: gets those facts when a program is read from the folder.
        is_uncompiled: whether calls run operator by operator now, for hooks that a script has set.
        is_pure: whether it is JAX's alone, so that a trace needs neither torch nor the model.

    Attributes:
        function: The function.
    """

    def __init__(
        self,
        cache: ExecutableCache,
        name: str,
        function: Callable[..., Any],
        *,
        donate: Mapping[str, int | None] = MappingProxyType({}),
        facts: Callable[[], dict[str, Any]] = dict,
        restore_facts: Callable[[dict[str, Any]], None] = lambda facts: None,
        is_uncompiled: Callable[[], bool] = lambda: False,
        is_pure: bool = False,
    ) -> None:
        self._cache, self.name, self.function = cache, name, function
        self._is_pure = is_pure
        self._donate, self.facts, self.restore_facts = dict(donate), facts, restore_facts
        self._programs: dict[ProgramSignature, Any] = {}
        self._weights: Weights = {}  # of the last call
        self._is_uncompiled = is_uncompiled
        self._locks: dict[ProgramSignature, CompileLock] = {}
        self._lock_owners: set[int] = set()
        cache.functions[name] = self

    @property
    def num_programs(self) -> int:
        """Programs in memory."""
        return len(self._programs)

    def temporary_bytes(self, weights: Weights, *args: Any, spec: Any) -> int:
        """Returns the bytes of a program's temporaries, by XLA's memory analysis."""
        analysis = self.compiled(weights, *args, spec=spec).memory_analysis()
        return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes)

    def __call__(self, weights: Weights, *args: Any, spec: Any) -> Any:
        """Runs the program of these arguments, compiled at the first call of their kind."""
        if self._is_uncompiled():
            from model_adapters.program.module_hooks import errors_of_hooks
            from model_adapters.program.trace_context import torch_promotion

            with errors_of_hooks(), torch_promotion():
                return self.function(weights, *args, spec=spec)
        with programs_run():
            return self.compiled(weights, *args, spec=spec)(weights, *args)

    def compiled(
        self, weights: Weights, *args: Any, spec: Any, when_traced: Callable[[], object] = lambda: None
    ) -> Any:
        """Returns the program for these arguments, loaded or compiled.

        Threads compile programs of different arguments in parallel. Arguments other than weights may be abstract, as
        `abstract` makes them. `when_traced` is called once the program is traced, if it has to be made: from then on
        others can be traced, while XLA compiles this one.
        """
        return self._compiled(ProgramSignature.of(args, spec, self._cache.names_modules), weights, args, when_traced)

    def name_modules(self) -> None:
        """Compiles every program in memory once more, with the names of modules."""
        for signature in list(self._programs):
            named = dataclasses.replace(signature, names_modules=True)
            with jax.default_matmul_precision(signature.precision):
                self._compiled(named, self._weights, signature.abstract_args(), lambda: None)

    def named_programs(self) -> list[Any]:
        """Returns the programs that have the names of modules."""
        return [program for signature, program in list(self._programs.items()) if signature.names_modules]

    def _compiled(
        self, signature: ProgramSignature, weights: Weights, args: tuple[Any, ...], when_traced: Callable[[], object]
    ) -> Any:
        program = self._programs.get(signature)
        if program is None:
            self._weights = weights
            with self._locks.setdefault(signature, CompileLock(self._lock_owners)):
                program = self._programs.get(signature)
                if program is None:
                    with gc_pause.paused():
                        program = self._load_or_compile(signature, weights, args, when_traced)
                    self._programs[signature] = program
        return program

    def _load_or_compile(
        self, signature: ProgramSignature, weights: Weights, args: tuple[Any, ...], when_traced: Callable[[], object]
    ) -> Any:
        mesh, launcher = self._cache.mesh, self._cache.launcher
        if launcher is not None:
            return launcher.program(self, weights, args, signature.spec, signature.precision)
        if mesh is not None:
            args = on_mesh(args, mesh)
        path = self._cache.path_of(self.name, signature)
        if path is not None and (kept := self._cache.read(path)) is not None:
            self.restore_facts(kept[1])
            when_traced()
            return kept[0]
        # A program that is kept here as a whole does not lie in JAX's own cache as well, unless the user has chosen
        # that one's folder: then the name tells it apart what this cache does.
        name = None if path is None else path.name.replace("-", "_")
        # JAX's own cache ignores names: it would give a program without them.
        is_bypassed = path is not None or signature.names_modules
        named: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if signature.names_modules:
            from model_adapters.program import module_scopes  # tracing needs torch, running does not

            name, named = f"{self.name}_{next(_NUMBERS)}", module_scopes.enabled()
        with jax_cache.counting_hits() as hits, jax_cache.bypassed(is_bypassed), named:
            program: Any = self.compile(
                weights, args, signature.spec, name=name, when_traced=when_traced, is_stored=path is not None
            )
        if mesh is not None:
            program = MeshExecutable(program, mesh, tuple(zip(self.donated, self._donate.values(), strict=True)))
        # XLA's CPU client cannot serialize a program that it has itself deserialized: functions are lost.
        if path is not None and not hits:
            self._cache.write(path, program, {} if self._cache.exported is not None else self.facts())
        return program

    def compile(
        self,
        weights: Weights,
        args: tuple[Any, ...],
        spec: Any,
        *,
        name: str | None = None,
        adapt: Callable[[Any], Any] = lambda out: out,
        when_traced: Callable[[], object] = lambda: None,
        is_stored: bool = False,
    ) -> Any:
        """Compiles the function anew.

        Args:
            weights: by name.
            args: arrays or their shapes, where the program will have them.
            spec: what is static.
            name: of the program.
            adapt: a last step of the program, over its result.
            when_traced: called between tracing and XLA.
            is_stored: whether it goes to disk, without locations.
        """

        exported = self._cache.exported
        if exported is not None:
            function = exported.function(self.name, args, spec)
        else:
            function = functools.partial(self.function, spec=spec)

        def traced(weights: Any, *args: Any) -> Any:
            self._cache.num_traces[self.name] += exported is None
            return adapt(function(weights, *args))

        traced.__name__ = name or self.name
        with self._tracing(), registry.fallbacks() as reasons:
            lowered = jax.jit(traced, donate_argnums=self.donated).lower(weights, *args)
        _report_slow_attention(self.name, reasons)
        when_traced()
        if is_stored:
            remove_locations(lowered)
        return lowered.compile()

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of the donated arguments, of which the weights are number 0."""
        parameters = list(inspect.signature(self.function).parameters)
        return tuple(parameters.index(each) for each in self._donate)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Holds what a trace of the function needs."""
        if self._is_pure or self._cache.exported is not None:
            with jax_promotion():
                yield
            return
        check_may_trace()
        self._cache.before_trace()
        from model_adapters.program.trace_context import (  # tracing needs torch, running does not
            torch_promotion,
            trace_lock,
        )

        with trace_lock(), torch_promotion(), tracing():  # a thread at a time: a trace changes the module
            yield
