"""Runtime of a stored model: weights and programs for the packed executor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from model_adapters.ops.compressed_weight import Weight
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour
from torchax_serve.start.recorded_objects import RecordedConfig
from torchax_serve.start.torch_side import TorchSide

if TYPE_CHECKING:
    from model_adapters.program.model_program import ModelProgram
    from torchax_serve.runtime.model_runtime import ModelRuntime


class RecordedProgram:
    """What an engine needs of a `ModelProgram` that is not traced.

    Args:
        side: The torch side.
        sharding: How the model lies on a mesh; None for one device.

    Attributes:
        rope: None: models whose programs depend on lengths are not recorded.
    """

    rope = None

    def __init__(self, side: TorchSide, sharding: Any = None) -> None:
        self._side, self.sharding = side, sharding
        self._facts: list[dict[str, Any]] = []

    def trace_facts(self) -> dict[str, Any]:
        """Returns the facts of the program; see `ModelProgram.trace_facts`."""
        return self.with_module().trace_facts()

    def restore_facts(self, facts: dict[str, Any]) -> None:
        """Stores facts of programs from disk until the program itself is there."""
        self._facts.append(facts)

    def with_module(self) -> ModelProgram:
        """Returns the program to be traced, whose module is loaded now if it was not."""
        program: ModelProgram = self._side.get().runtimes[0].program
        while self._facts:
            program.restore_facts(self._facts.pop())
        return program


class RecordedRuntime:
    """What an engine needs of a `ModelRuntime` whose programs and probes are stored.

    Args:
        side: The torch side, which tracing needs.
        weights: Weights by name.
        executables: Programs of the model.
        config: Configuration of the model.
        limits: Fields of `InputLimits`.
        sharding: How the model lies on a mesh; None for one device.
        sampling_rules: Release of transformers whose processors are followed.

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
        config: RecordedConfig,
        limits: dict[str, Any],
        sharding: Any = None,
        sampling_rules: TransformersBehaviour | None = None,
    ) -> None:
        self._side = side
        self.weights, self.text_config, self.sampling_rules = weights, config, sampling_rules
        self.steps = SimpleNamespace(executables=executables)
        self.program = RecordedProgram(side, sharding)
        self.limits = SimpleNamespace(**limits)

    def with_module(self) -> ModelRuntime:
        """Returns the runtime to be traced, whose module is loaded now if it was not."""
        return self._side.get().runtimes[0]
