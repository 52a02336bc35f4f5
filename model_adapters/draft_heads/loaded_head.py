"""A loaded draft head: its module, its weights, and what it reads of the model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.sharding import Mesh

from model_adapters.device_arrays import part_on
from model_adapters.ops.compressed_weight import Weight, Weights

if TYPE_CHECKING:
    from model_adapters.program.model_program import ModelProgram


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadedWeights:
    """The weights of a model and of its draft head, as steps with both take them."""

    model: Weights
    head: Weights
    token_ids: jax.Array | None  # int32[columns], token of each column of the head's logits; None: the column itself


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedHead:
    """A draft head, in the place of its name in `SpeculativeConfig.model`.

    Attributes:
        name: Its name.
        program: Its forward.
        weights: Its own weights by name.
        shared: Names of its tensors that are the model's, with the model's names.
        layers: Hidden states of the model that it takes, as ``output_hidden_states`` counts them.
        token_ids: As of `HeadedWeights`.
        kv_shape: Heads and width of its keys and values; None: those of the model's last layer.
        has_indexer: Whether its attention has an indexer, whose keys are as those of the model's.
    """

    name: str
    program: ModelProgram
    weights: Mapping[str, Weight]
    shared: Mapping[str, str]
    layers: tuple[int, ...]
    token_ids: jax.Array | None = None
    kv_shape: tuple[int, int] | None = None
    has_indexer: bool = False

    @property
    def num_pools(self) -> int:
        """Number of its pools of pages."""
        return 2 if self.has_indexer else 1

    def __repr__(self) -> str:
        """Returns name and identity, under which programs that contain it are stored."""
        return f"{self.name} ({self.identity})"

    @property
    def identity(self) -> str:
        """What programs depend on: the class, its configuration, the hidden states that it takes."""
        module = self.program.module
        said: dict[str, Any] = module.config.to_dict()
        said.pop("_name_or_path", None)
        described = repr((type(module).__name__, sorted(said.items(), key=str), self.layers, sorted(self.shared)))
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    @property
    def mesh_description(self) -> str | None:
        """One line for people: how many of its own tensors the mesh divides; None on one device."""
        sharding = self.program.sharding
        if sharding is None:
            return None
        own = [sharding.placed[name] for name in self.weights]
        num_divided = sum(any(dim.mesh_axis for dim in each.dims) for each in own)
        axes = " x ".join(f"{axis} {size}" for axis, size in sharding.mesh.shape.items())
        return (
            f"draft head {self.name}: {num_divided} of its {len(own)} tensors divided by rules of the model's layers "
            f"or by shape on {axes}; the others replicated"
        )

    def on(self, mesh: Mesh | None) -> Self:
        """Returns the head on the devices of one replica of its model; None: on one device."""
        sharding = self.program.sharding
        if mesh is None or sharding is None:
            return self
        from model_adapters.program.model_program import ModelProgram  # needs torch

        there = functools.partial(part_on, mesh=mesh)
        replica = next(each for each in sharding.replicas() if each.mesh == mesh)
        return dataclasses.replace(
            self,
            program=ModelProgram(self.program.module, replica),
            weights={name: jax.tree.map(there, weight) for name, weight in self.weights.items()},
            token_ids=None if self.token_ids is None else there(self.token_ids),
        )

    def with_model(self, model: Weights) -> Any:
        """Returns its weights beside those of the model, as `HeadedWeights`."""
        return HeadedWeights(model, dict(self.weights), self.token_ids)

    def tensors(self, weights: HeadedWeights) -> Weights:
        """Returns all tensors of the head by name, with those of the model that it shares."""
        return {**weights.head, **{own: weights.model[name] for own, name in self.shared.items()}}


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedAssistant(LoadedHead):
    """A head without keys and values: it reads those of the model.

    Attributes:
        reads: Each kind of its layers, the layer of the model that these read, and the columns of its keys.
    """

    reads: tuple[tuple[str, int, int], ...] = ()
