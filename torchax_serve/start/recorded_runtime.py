"""Runtime of a recorded model: weights and programs for the packed executor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from model_adapters.ops.compressed_weight import Weight
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour
from torchax_serve.start.torch_side import TorchSide


class RecordedProgram:
    """Stands for the `ModelProgram`, which only tracing needs.

    Args:
        side: The torch side.
        sharding: How the model lies on a mesh; None for one device.
        sampling_rules: Release of transformers whose processors are followed.

    Attributes:
        rope: None: models whose programs depend on lengths are not recorded.
    """

    rope = None

    def __init__(self, side: TorchSide, sharding: Any = None) -> None:
        self._side, self.sharding = side, sharding
        self._facts: list[dict[str, Any]] = []

    def trace_facts(self) -> dict[str, Any]:
        """Returns the facts of the program; see `ModelProgram.trace_facts`."""
        facts: dict[str, Any] = self._program().trace_facts()
        return facts

    def restore_facts(self, facts: dict[str, Any]) -> None:
        """Stores facts of programs from disk until the program itself is there."""
        self._facts.append(facts)

    def _program(self) -> Any:
        program = self._side.get().runtime.program
        while self._facts:
            program.restore_facts(self._facts.pop())
        return program

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program(), name)


class RecordedSteps:
    """Stands for the `StepFunctions`; an engine of a packed model needs its programs alone.

    Args:
        side: The torch side.
        executables: Programs of the model.
    """

    def __init__(self, side: TorchSide, executables: ExecutableCache) -> None:
        self._side, self.executables = side, executables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side.get().runtime.steps, name)


class RecordedRuntime:
    """Stands for the `ModelRuntime` where an engine is built and runs.

    Args:
        side: The torch side, which tracing needs.
        weights: Weights by name.
        executables: Programs of the model.
        config: Configuration of the model.
        limits: Fields of `InputLimits`.
        sharding: How the model lies on a mesh; None for one device.

    Attributes:
        encoder: None: models with one are not recorded.
        weights_version: Version of the weights of the files.
        lora: None: models with adapters are not recorded.
    """

    encoder = lora = None
    weights_version = 0

    def __init__(
        self,
        side: TorchSide,
        weights: dict[str, Weight],
        executables: ExecutableCache,
        config: Any,
        limits: dict[str, Any],
        sharding: Any = None,
        sampling_rules: TransformersBehaviour | None = None,
    ) -> None:
        self._side = side
        self.weights, self.text_config, self.sampling_rules = weights, config, sampling_rules
        self.steps = RecordedSteps(side, executables)
        self.program = RecordedProgram(side, sharding)
        self.limits = SimpleNamespace(**limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side.get().runtime, name)
