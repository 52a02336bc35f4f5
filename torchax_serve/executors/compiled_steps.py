"""The compiled steps of an executor by spec, and the compilation of those that come next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

from model_adapters.ops.compressed_weight import Weights
from torchax_serve.compilation.background import BackgroundCompiler, CompileTask, abstract
from torchax_serve.compilation.executable_cache import CachedFunction

Spec = TypeVar("Spec", bound=Hashable)


class CompiledSteps(Generic[Spec]):
    """Programs by spec, which determines the shapes of all arguments.

    Args:
        weights: Weights by name, the first argument of every step.
        background: Compiles programs ahead; None: each is compiled where it is needed.
    """

    def __init__(self, weights: Weights, background: BackgroundCompiler | None) -> None:
        self._weights, self._background = weights, background
        self._programs: dict[Spec, Any] = {}

    @property
    def compiles_ahead(self) -> bool:
        """Whether other threads compile programs."""
        return self._background is not None

    def has(self, spec: Spec) -> bool:
        """Returns whether the program of `spec` is there."""
        return spec in self._programs

    def get(
        self, function: CachedFunction, spec: Spec, args: tuple[Any, ...], when_traced: Callable[[], object]
    ) -> Any:
        """Returns the program of `spec`, compiled here if it is not there.

        Args:
            function: The function of the step.
            spec: Its static arguments.
            args: Its other arguments, without the weights.
            when_traced: Called while XLA compiles, if the program has to be compiled.
        """
        program = self._programs.get(spec)
        if program is None:
            program = function.compiled(self._weights, *args, spec=spec, when_traced=when_traced)
            self._programs[spec] = program
        return program

    def task(self, function: CachedFunction, spec: Spec, args: tuple[Any, ...]) -> CompileTask:
        """Returns the task to compile a program, for any thread if programs are compiled ahead."""
        args = abstract(args) if self.compiles_ahead else args
        return CompileTask(spec, partial(self.get, function, spec, args, lambda: None))

    def compile_ahead(self, function: CachedFunction, spec: Spec, args: tuple[Any, ...]) -> None:
        """Starts to compile a program in the background, if it is not there."""
        if self._background is not None and not self.has(spec):
            self._background.submit(self.task(function, spec, args))
