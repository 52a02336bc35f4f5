"""Sharding of a model on a mesh of devices.

It has the layout of the weights, and what a trace of the model's code needs to know of it. The unmodified forward is
traced once for all devices, and XLA divides the work as the weights are divided (GSPMD, Xu et al. 2021). Three things
are not left to XLA: attention runs on each device's heads (`model_adapters.ops.spmd`), experts on each device's share
of them (`model_adapters.program.moe`), and fused products are kept apart where model code cuts them
(`model_adapters.jaxpr.split_concats`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from transformers import PreTrainedConfig, PreTrainedModel

from model_adapters import quirks
from model_adapters.bridge.views import named_tensors
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.compressed_weight import Weight, Weights
from model_adapters.ops.memory_layout import experts_by_output, inputs_first, remembered
from model_adapters.ops.spmd import on_mesh, pool_spec, recurrent_spec, state_spec
from model_adapters.sharding.rule_selection import input_embeddings, rules_for
from model_adapters.sharding.sharded_trace import placements_known
from sharding_rules import HeadCounts, RuleTable, ShardingRuleError, TensorPlacement, place
from sharding_rules.layout import DimLayout, take


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSharding:
    """Layout of one model on a mesh.

    Attributes:
        mesh: Mesh with the axes ``data``, ``model`` and ``expert``.
        placed: Placements by tensor name.
        vocab_size: Number of columns of the logits without padding; None for a model whose logits are no words.
        config_values: Numbers that model code reads from its configuration and that differ on the mesh.
        attributes: The same for modules: name, attribute, value.
        experts: Names of the experts' weights [experts, out, in], which `memory_layout` places.
    """

    mesh: Mesh
    placed: Mapping[str, TensorPlacement]
    vocab_size: int | None
    config_values: Mapping[str, int]
    attributes: tuple[tuple[str, str, int], ...]
    experts: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, module: PreTrainedModel, mesh: Mesh, *, refuse_uneven: bool = False, table: RuleTable | None = None
    ) -> ModelSharding:
        """Returns the layout of `module` on `mesh`, by the rules of its type or those of `table`.

        Raises:
            InvalidArgumentError: rules that do not fit the model, or zeros that were refused.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}
        config = module.config.get_text_config(decoder=True)
        mesh_shape = {str(axis): size for axis, size in mesh.shape.items()}
        table = table or rules_for(module, shapes, mesh_shape.get("model", 1))
        units = _units(module, config, mesh_shape.get("model", 1))
        try:
            placed = place(table, shapes, mesh_shape, units, refuse_uneven=refuse_uneven)
        except ShardingRuleError as error:
            raise InvalidArgumentError(str(error)) from error
        counts = _head_counts(placed, units)
        lengths = {**_axis_lengths(placed), **{f"num_{axis}": number for axis, number in counts.items()}}
        attributes = tuple(
            (name, attribute, lengths[axis])
            for pattern, attribute, axis in table.attributes
            if axis in lengths
            for name, _ in module.named_modules()
            if re.fullmatch(pattern, name)
        )
        before = {"num_attention_heads": (units.heads, "heads"), "num_key_value_heads": (units.kv_heads, "kv_heads")}
        values = {
            name: counts[axis]
            for name, (number, axis) in before.items()
            if axis in counts and counts[axis] != number and hasattr(config, name)
        }
        return cls(mesh, placed, _vocab_size(module, config), values, attributes, experts_by_output(module))

    def replicas(self) -> list[ModelSharding]:
        """Returns the same layout for each replica: the devices at one index of the axis ``data``."""
        names = self.mesh.axis_names
        axis = names.index("data")
        number = self.mesh.devices.shape[axis]
        parts = np.split(self.mesh.devices, number, axis)
        return [dataclasses.replace(self, mesh=Mesh(part, names)) for part in parts]

    @property
    def has_fused_weights(self) -> bool:
        """Whether results of fused products must stay in parts."""
        return any(placed.rule.parts or any(dim.sections for dim in placed.dims) for placed in self.placed.values())

    @functools.cached_property
    def min_tokens_to_shard(self) -> int | None:
        """Least number of tokens of prompts in one step from which tokens are divided.

        Dividing them then costs less exchange than dividing products. Divided products end in a sum of
        ``tokens x rows`` over the devices, whose exchange is twice its size; divided tokens need every weight of the
        layers gathered. None: tokens are never divided, as experts and fused products are exchanged in other ways.
        """
        shards = self.mesh.shape.get("model", 1)
        gathered = [placed for name, placed in self.placed.items() if self._is_gathered(name)]
        sums = sum(placed.laid_out_shape[0] for placed in gathered if placed.dims[-1].mesh_axis == "model")
        has_experts = any(len(placed.shape) > 2 and "model" in placed.spec for placed in self.placed.values())
        if shards == 1 or self.mesh.shape.get("expert", 1) > 1 or not sums or self.has_fused_weights or has_experts:
            return None
        size = sum(placed.laid_out_shape[0] * placed.laid_out_shape[1] for placed in gathered)
        return math.ceil(size / (2 * sums * (1 - 1 / shards)))  # the exchange of tokens for heads is one n-th of sums

    def _is_gathered(self, name: str) -> bool:
        """Returns whether a weight is of a layer, so that a step over divided tokens gathers it."""
        placed = self.placed[name]
        return len(placed.shape) == 2 and "model" in placed.spec and "vocab" not in (placed.rule.axes or ())

    def divides_tokens(self, num_tokens: int) -> bool:
        """Returns whether a step of so many tokens of prompts is divided by tokens."""
        least = self.min_tokens_to_shard
        return least is not None and num_tokens >= least and num_tokens % self.mesh.shape["model"] == 0

    def with_gathered_layers(self, weights: Weights) -> dict[str, Weight]:
        """Returns `weights` with those of the layers gathered; in a trace."""
        replicated = self.replicated()
        return {
            name: jax.lax.with_sharding_constraint(array, replicated) if self._is_gathered(name) else array
            for name, array in weights.items()
        }

    def sharding_of(self, name: str) -> NamedSharding:
        """Returns the sharding of the tensor `name`."""
        return NamedSharding(self.mesh, self.placed[name].spec)

    def place_of(self, name: str) -> Sharding | Format:
        """Returns the sharding of the tensor `name`, with the layout that it has in memory."""
        sharding = self.sharding_of(name)
        return inputs_first(sharding) if name in self.experts else sharding

    def replicated(self) -> NamedSharding:
        """Returns the sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    def pool_sharding(self, kv_heads: int) -> NamedSharding:
        """Returns the sharding of a pool of pages with `kv_heads` heads."""
        return NamedSharding(self.mesh, pool_spec(kv_heads, self.mesh))

    def state_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of states ``[slots, 1, channels or heads, ...]``."""
        return NamedSharding(self.mesh, state_spec(shape, self.mesh))

    def recurrent_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of recurrent states ``[rows, channels or heads, ...]``."""
        return NamedSharding(self.mesh, recurrent_spec(shape, self.mesh))

    def abstract(self, name: str, dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns shape, dtype and sharding of the tensor `name`."""
        return jax.ShapeDtypeStruct(self.placed[name].laid_out_shape, dtype, sharding=self.place_of(name))

    def put(self, name: str, array: Any) -> jax.Array:
        """Gives each device its part of the tensor called `name`.

        `array` is the tensor as the model has it, in the host's memory.
        """
        placed = self.placed[name]
        if tuple(array.shape) != placed.shape:
            raise InvalidArgumentError(f"{name}: expected shape {placed.shape}, got {tuple(array.shape)}")
        return self.divided(array, placed.dims, self.place_of(name))

    def divided(self, array: Any, dims: Sequence[DimLayout], sharding: Sharding | Format | None = None) -> jax.Array:
        """Gives each device its part of ``array[...]``, as `dims` say.

        `sharding` is theirs, perhaps with a layout.
        """

        def part(index: Any) -> np.ndarray:
            return part_of(array, dims, index)

        place = sharding or NamedSharding(self.mesh, PartitionSpec(*(dim.mesh_axis for dim in dims)))
        return remembered(jax.make_array_from_callback(tuple(dim.size for dim in dims), place, part), place)

    def moves_columns(self, name: str, *, transposed: bool) -> bool:
        """Returns whether columns of the weight `name` are moved, repeated or added.

        Groups of such columns cannot be.
        """
        return self.placed[name].dims[-2 if transposed else -1].index is not None

    @contextlib.contextmanager
    def trace_context(self, module: PreTrainedModel, weights: Mapping[str, jax.Array]) -> Iterator[None]:
        """Makes `module` compute with `weights` on the mesh, inside the context."""
        placed = {id(weights[name]): each for name, each in self.placed.items()}
        config = module.config.get_text_config(decoder=True)
        owners: list[tuple[Any, str, int]] = [(config, name, value) for name, value in self.config_values.items()]
        owners += [(module.get_submodule(name), attribute, value) for name, attribute, value in self.attributes]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in owners]
        try:
            for owner, name, value in owners:
                setattr(owner, name, value)
            with on_mesh(self.mesh), placements_known(self.mesh, placed):
                yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


def _vocab_size(module: PreTrainedModel, config: Any) -> int | None:
    """Returns the number of logits of a token; None for a model whose logits are no words."""
    head = module.get_output_embeddings()
    if head is not None and hasattr(head, "weight"):
        return int(head.weight.shape[0])
    if not module.can_generate():
        return None
    words = input_embeddings(module)  # one table, or one for each codebook
    return int(getattr(words, "num_embeddings", None) or config.vocab_size)


def part_of(array: Any, dims: Sequence[DimLayout], index: Sequence[slice]) -> np.ndarray:
    """Returns the part `index` of `array` laid out as `dims` say.

    Plain slices come first: they copy nothing.
    """
    plain = tuple(part if dim.index is None else slice(None) for dim, part in zip(dims, index, strict=True))
    taken = np.asarray(array[plain] if plain else array)
    for number, (dim, part) in enumerate(zip(dims, index, strict=True)):
        if dim.index is not None:
            start, stop, _ = part.indices(dim.size)
            taken = take(taken, number, dim, start, stop)
    return taken


def _axis_lengths(placed: Mapping[str, TensorPlacement]) -> dict[str, int]:
    """Returns the length on the mesh of each axis that all tensors agree on."""
    found: dict[str, set[int]] = {}
    for each in placed.values():
        for axis, dim in zip(each.rule.axes or (), each.dims, strict=False):
            if axis is not None:
                found.setdefault(axis, set()).add(dim.size)
    return {axis: sizes.pop() for axis, sizes in found.items() if len(sizes) == 1}


def _head_counts(placed: Mapping[str, TensorPlacement], units: HeadCounts) -> dict[str, int]:
    """Returns the numbers of query heads and KV heads of a layer on the mesh, by logical axis."""
    counts: dict[str, int] = {}
    for each in placed.values():
        for axis, dim in zip(each.rule.axes or (), each.dims, strict=False):
            number = getattr(units, axis, None) if axis in ("heads", "kv_heads") else None
            if number:
                counts[str(axis)] = dim.size * number // dim.size_before
            elif axis == "qkv" and dim.sections and units.heads and units.kv_heads:
                width = dim.size_before // (units.heads + 2 * units.kv_heads)
                counts |= {"heads": dim.sections[0] // width, "kv_heads": dim.sections[1] // width}
    return counts


def head_counts(config: PreTrainedConfig) -> HeadCounts:
    """Returns the heads of a layer by the configuration; none where layers differ in number."""
    try:
        heads = getattr(config, "num_attention_heads", None)
        kv_heads = getattr(config, "num_key_value_heads", None)
    except RuntimeError:  # transformers' answer to a question about all layers that has none
        return HeadCounts()
    if not isinstance(heads, int):
        return HeadCounts()
    return HeadCounts(heads, kv_heads if isinstance(kv_heads, int) else heads)


def _units(module: PreTrainedModel, config: PreTrainedConfig, num_shards: int) -> HeadCounts:
    """Returns `head_counts`; none if layers differ and some do not divide by the devices.

    Then a layer's heads would have to be repeated more often than another's, and model code knows of one number.
    """
    units = head_counts(config)
    if quirks.of_type(config.model_type).keeps_value_heads and units.kv_heads and units.kv_heads % num_shards:
        return HeadCounts()
    attentions = (child for child in module.modules() if getattr(child, "config", None) is config)
    groups = {size for child in attentions if isinstance(size := getattr(child, "num_key_value_groups", None), int)}
    counts = {units.heads // size for size in groups if units.heads and size}
    return HeadCounts() if len(counts) > 1 and any(count % num_shards for count in counts) else units
