"""A draft model that was loaded with the model it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax.sharding import Mesh

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime


class LoadedDraft:
    """A draft model, in the place of its name in `SpeculativeConfig.model`.

    Args:
        name: Its name.
        runtimes: The model on JAX, where the larger model is: on one device, or on the mesh of each replica.
    """

    def __init__(self, name: str, runtimes: Sequence[ModelRuntime]) -> None:
        self.name, self._runtimes = name, runtimes

    def on(self, mesh: Mesh | None) -> ModelRuntime:
        """Returns the model on the devices of `mesh`; None: on one device."""
        return next(each for each in self._runtimes if each.steps.executables.mesh == mesh)

    def __repr__(self) -> str:
        """Returns name and identity, under which programs that contain it are stored.

        The address of a model without identity keeps them in memory.
        """
        identity = self._runtimes[0].steps.executables.identity
        return f"{self.name} ({identity})" if identity else object.__repr__(self)
