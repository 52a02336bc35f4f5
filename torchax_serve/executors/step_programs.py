"""The compiled steps of an executor by spec, and the compilation of those that come next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from model_adapters.ops.compressed_weight import Weights
from torchax_serve.compilation.background import CompileTask, abstract
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache

Spec = TypeVar("Spec", bound=Hashable)


class StepCall(NamedTuple):
    """A step that can be compiled: its function and arguments.

    The arguments are those behind the weights, as arrays or shapes.
    """

    function: CachedFunction
    args: tuple[Any, ...]


class StepPrograms(Generic[Spec]):
    """Programs by spec, which determines the shapes of all arguments.

    Args:
        weights: Weights by name, the first argument of every step.
        cache: Cache of the programs. Its `background` compiles them ahead; None: each is compiled where it is needed.
        call_of: Returns what to compile for a spec.

    Attributes:
        num_substitutes: Number of times that `choose` chose another than the first.
    """

    def __init__(self, weights: Weights, cache: ExecutableCache, call_of: Callable[[Spec], StepCall]) -> None:
        self._weights, self._cache, self._call_of = weights, cache, call_of
        self._background = cache.background
        self._unnamed: dict[Spec, Any] = {}
        self._named: dict[Spec, Any] = {}  # with the names of modules
        self._next: list[Spec] = []
        self.num_substitutes = 0

    @property
    def _programs(self) -> dict[Spec, Any]:
        return self._named if self._cache.names_modules else self._unnamed

    @property
    def compiles_ahead(self) -> bool:
        """Whether other threads compile programs."""
        return self._background is not None

    def choose(self, specs: Sequence[Spec]) -> Spec:
        """Returns the first of `specs` whose program is there.

        Another thread compiles the first of all meanwhile.

        The first of all, if none is there or no other thread compiles.
        """
        if self._background is None or self._is_there(specs[0]):
            return specs[0]
        found = next((spec for spec in specs if self._is_there(spec)), None)
        if found is None:
            return specs[0]
        self.num_substitutes += 1
        self._compile_ahead([specs[0]])
        return found

    def _is_there(self, spec: Spec) -> bool:
        # What had run before a profile began was compiled again with names then.
        return spec in self._programs or spec in self._unnamed

    def get(self, spec: Spec, call: StepCall) -> Any:
        """Returns the program of `spec` for the arguments of `call`; compiles it if need be.

        While XLA compiles it, other threads begin with those named by `expect`.
        """
        program = self._programs.get(spec)
        if program is None:
            expected = partial(self._compile_ahead, self._next)
            program = call.function.compiled(self._weights, *call.args, spec=spec, when_traced=expected)
            self._programs[spec] = program
        return program

    def expect(self, specs: list[Spec]) -> None:
        """Names the programs that are needed after the next one."""
        self._next = specs

    def task(self, spec: Spec) -> CompileTask:
        """Returns the task to compile a program; it returns the program, and any thread may run it."""

        def compile() -> Any:
            program = self._programs.get(spec)
            if program is None:
                function, args = self._call_of(spec)
                program = self._programs[spec] = function.compiled(self._weights, *abstract(args), spec=spec)
            return program

        return CompileTask(spec, compile)

    def _compile_ahead(self, specs: list[Spec]) -> None:
        if self._background is not None:
            for spec in specs:
                self._background.submit(self.task(spec))
