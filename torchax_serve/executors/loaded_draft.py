"""A draft model that was loaded with the model it drafts for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime


class LoadedDraft:
    """A draft model, in the place of its name in `SpeculativeConfig.model`.

    Args:
        name: Its name.
        runtime: The model on JAX.
    """

    def __init__(self, name: str, runtime: ModelRuntime) -> None:
        self.name, self.runtime = name, runtime

    def __repr__(self) -> str:
        """Returns name and identity, under which programs that contain it are stored.

        The address of a model without identity keeps them in memory.
        """
        identity = self.runtime.steps.executables.identity
        return f"{self.name} ({identity})" if identity else object.__repr__(self)
