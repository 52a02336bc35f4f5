"""Rules, as data, for the placement of the dimensions of tensors on axes of a device mesh.

Two steps, as in JAX's larger language-model codebases. A *rule* names the dimensions of the tensors whose full name
its pattern matches, by *logical axes* (``("heads", "embed")``). One small map then sends logical axes to *mesh axes*:

* ``data``: replicas of the model, each with its part of the requests;
* ``model``: tensor parallelism, the heads, the hidden units of the MLP and the vocabulary are divided;
* ``expert``: the experts of a mixture are divided.

That a pattern must match the full name, that the first match wins, and that unused rules are reported, is learned from
Qwix (https://github.com/google/qwix), where quantization is described in this way. Here unused rules and unmatched
tensors are errors, and all that is wrong is said at once.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from sharding_rules.layout import (
    AxisLayout,
    DimLayout,
    Fused,
    Parts,
    fused_dim,
    layout_dim,
    layout_heads,
    padded_units,
    parts_dim,
)

MESH_AXES = ("data", "model", "expert")

# None: every device has all of the dimension.
LOGICAL_AXES: Mapping[str, str | None] = {
    "vocab": "model",
    "embed": None,
    "heads": "model",  # query heads times whatever a head has
    "kv_heads": "model",  # key or value heads times whatever a head has
    "mlp": "model",
    "mlp_pairs": "model",  # gate and up of one hidden unit side by side
    "experts": "expert",
    "state": "model",  # channels of a convolution or a state space, each by itself
    "modulation": "model",  # scales and shifts, one row per image: divided weights, a short result that is gathered
    "columns": "model",  # whatever a product makes or takes where nothing more is known of it
    "parts": "model",  # parts of a recurrent layer, each with its own heads, as the rule says
    "latent": None,  # a compressed key, value or query, shared by all heads
}

# A dimension that holds several logical axes one after the other.
FUSED_AXES: Mapping[str, Fused] = {
    "qkv": Fused(("heads", "kv_heads", "kv_heads")),
    "gate_up": Fused(("mlp", "mlp")),
    "two_states": Fused(("state", "state")),
    "heads_mlp": Fused(("heads", "mlp")),
}

UNIT_SIZES: Mapping[str, int] = {"mlp_pairs": 2}
"""Elements that stay together, where that is not one."""


class ShardingRuleError(ValueError):
    """A rule table that does not fit a model or a mesh; lists everything that is wrong."""


@dataclass(frozen=True)
class Rule:
    """The logical axes of the tensors with a name of one form.

    Attributes:
        pattern: Regular expression for the full name.
        axes: a logical axis, or None for a dimension that is never divided, for each dimension; None instead of
            them all for replicated tensors of any rank.
        optional: whether a model of the family may have no such tensor; any other rule must be used.
        source: who says so, for people.
        parts: what the dimension of the axis ``parts`` holds; of a convolution, which every device has all of, what
            its channels are.
    """

    pattern: str
    axes: tuple[str | None, ...] | None
    optional: bool = False
    source: str = "table"
    parts: Parts | None = None


@dataclass(frozen=True)
class RuleTable:
    """The rules of a family of architectures, the first that matches counts.

    Attributes:
        family: name in messages.
        rules: in order of precedence.
        pads: logical axes that may be filled up with zeros where the devices do not divide their number; every
            result is then exactly what it was. Others are replicated.
        attributes: numbers that modules of the family compute with and that follow from an axis: pattern of the
            module's name, attribute, and the axis whose length it is; ``num_heads`` and ``num_kv_heads`` are how many.
    """

    family: str
    rules: tuple[Rule, ...]
    pads: frozenset[str] = frozenset({"vocab", "mlp", "mlp_pairs", "heads", "kv_heads"})
    attributes: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class TensorPlacement:
    """Placement of one tensor.

    Attributes:
        name: qualified.
        shape: as the model has it.
        dims: how each dimension is laid out.
        rule: whose axes these are.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[DimLayout, ...]
    rule: Rule

    @property
    def spec(self) -> PartitionSpec:
        """Mesh axis by dimension."""
        return PartitionSpec(*(dim.mesh_axis for dim in self.dims))

    @property
    def laid_out_shape(self) -> tuple[int, ...]:
        """Shape on the mesh, with zeros and repeated heads."""
        return tuple(dim.size for dim in self.dims)

    @property
    def layout_key(self) -> Hashable:
        """Equal for tensors that are laid out alike, whatever their names."""
        return tuple(
            (
                dim.size_before,
                dim.size,
                dim.mesh_axis,
                dim.sections,
                dim.copied,
                None if dim.index is None else dim.index.tobytes(),
            )
            for dim in self.dims
        )

    @property
    def is_unchanged(self) -> bool:
        """Whether no element is moved, repeated or added."""
        return all(dim.index is None for dim in self.dims)

    def num_shards(self, mesh_shape: Mapping[str, int]) -> int:
        """Parts that the tensor is cut into."""
        number = 1
        for dim in self.dims:
            number *= mesh_shape.get(dim.mesh_axis, 1) if dim.mesh_axis is not None else 1
        return number

    def bytes_per_device(self, mesh_shape: Mapping[str, int], itemsize: int) -> int:
        """Returns bytes of one part, elements of `itemsize` bytes."""
        size = itemsize
        for length in self.laid_out_shape:
            size *= length
        return size // self.num_shards(mesh_shape)


@dataclass(frozen=True)
class HeadCounts:
    """Numbers of heads of a layer, by the configuration; other axes count single elements.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and values.
        mlp: parts, each as wide as a head, of an MLP that lies behind heads in one dimension.
    """

    heads: int | None = None
    kv_heads: int | None = None
    mlp: int | None = None


@dataclass
class _Placement:
    """One run of `place`: what is asked, and what went wrong so far."""

    table: RuleTable
    mesh_shape: Mapping[str, int]
    units: HeadCounts
    logical_axes: Mapping[str, str | None]
    refuse_uneven: bool
    problems: list[str] = field(default_factory=list)

    def num_shards(self, axis: str) -> int:
        mesh_axis = self.logical_axes.get(axis)
        return self.mesh_shape.get(mesh_axis, 1) if mesh_axis is not None else 1

    def layout_of(self, axis: str, size: int) -> AxisLayout | str:
        """Returns the layout of `size` elements of one logical axis, or why they cannot be divided."""
        shards = self.num_shards(axis)
        if axis in ("heads", "kv_heads"):
            layouts = self.heads(shards)
            if isinstance(layouts, str):
                return layouts
            layout = layouts[0] if axis == "heads" else layouts[1]
        else:
            unit = UNIT_SIZES.get(axis, 1)
            if size % unit:
                return f"{size} elements are no whole number of units of {unit}"
            layout = padded_units(size // unit, shards)
            if layout.has_padding and axis not in self.table.pads:
                return f"{layout.num_before} are not divisible by {shards}, and zeros would change the result"
        if size % layout.num_before:
            return f"{size} elements are no whole number for each of {layout.num_before}"
        if self.refuse_uneven and layout.has_padding:
            self.problems.append(
                f"{layout.num_before} {axis} over {shards} devices: zeros would be added, which was refused"
            )
        return layout

    def heads(self, shards: int) -> tuple[AxisLayout, AxisLayout] | str:
        """Returns query heads and KV heads, divided together or not at all."""
        heads, kv_heads = self.units.heads, self.units.kv_heads or self.units.heads
        if not heads or not kv_heads or heads % kv_heads:
            return f"{heads} query heads over {kv_heads} heads of keys and values are not known to divide"
        layouts = layout_heads(heads, kv_heads, shards)
        if any(layout.has_padding for layout in layouts) and not {"heads", "kv_heads"} <= self.table.pads:
            return f"{heads} query heads over {kv_heads} do not divide by {shards}, and zeros would change the result"
        return layouts

    def dim(self, axis: str | None, size: int, parts: Parts | None) -> DimLayout:
        """Returns the layout of a dimension of `size`.

        It is undivided if its axis is, or cannot be divided.
        """
        undivided = DimLayout(size, size, None, None)
        if axis is None:
            return undivided
        if axis == "parts":
            return self._dim_of_parts(parts, size) or undivided
        if axis in FUSED_AXES:
            fused = FUSED_AXES[axis]
            shards = self.num_shards(fused.axes[0])
            sizes = self._section_sizes(fused, size)
            if shards == 1 or sizes is None:
                return undivided
            layouts = [self.layout_of(a, s) for a, s in zip(fused.axes, sizes, strict=True)]
            known = [layout for layout in layouts if isinstance(layout, AxisLayout)]
            if len(known) < len(layouts):
                return undivided
            return fused_dim(known, sizes, shards, self.logical_axes[fused.axes[0]])
        if self.num_shards(axis) == 1:
            return undivided
        layout = self.layout_of(axis, size)
        return undivided if isinstance(layout, str) else layout_dim(layout, size, self.logical_axes[axis])

    def _dim_of_parts(self, parts: Parts | None, size: int) -> DimLayout | None:
        """Returns the layout of a dimension of `parts`; None where they cannot be divided."""
        if parts is None or sum(parts.sizes) != size:
            self.problems.append(f"a dimension of {size} is not made of {parts}")
            return None
        shards = self.num_shards("parts")
        return None if shards == 1 else parts_dim(parts, shards, self.logical_axes["parts"])

    def _section_sizes(self, fused: Fused, size: int) -> list[int] | None:
        counts = [getattr(self.units, axis, None) or 1 for axis in fused.axes]
        if size % sum(counts):
            self.problems.append(f"a fused dimension of {size} is no whole number for each of {sum(counts)} parts")
            return None
        return [size // sum(counts) * count for count in counts]


def place(
    table: RuleTable,
    shapes: Mapping[str, Sequence[int]],
    mesh_shape: Mapping[str, int],
    units: HeadCounts | None = None,
    *,
    logical_axes: Mapping[str, str | None] = LOGICAL_AXES,
    refuse_uneven: bool = False,
) -> dict[str, TensorPlacement]:
    """Returns the placement of every tensor of a model.

    Args:
        table: rules of the model's family.
        shapes: shape by qualified name, of all tensors.
        mesh_shape: number of devices by mesh axis; a mesh axis that is not named has one device.
        units: how many heads a layer has; without it heads are not divided.
        logical_axes: mesh axis by logical axis.
        refuse_uneven: an error for what would have to be padded with zeros.

    Raises:
        ShardingRuleError: unmatched tensors, unused rules, ranks that differ, unknown axes, two dimensions on
            one mesh axis; all of them.
    """
    run = _Placement(table, mesh_shape, units or HeadCounts(), logical_axes, refuse_uneven)
    run.problems += _problems_of_axes(table, mesh_shape, logical_axes)
    patterns = [re.compile(rule.pattern) for rule in table.rules]
    used: set[int] = set()
    placed = {}
    for name, shape in shapes.items():
        number = next((i for i, pattern in enumerate(patterns) if pattern.fullmatch(name)), None)
        if number is None:
            run.problems.append(f"{name} {tuple(shape)}: no rule matches; add one")
            continue
        used.add(number)
        rule = table.rules[number]
        axes = (None,) * len(shape) if rule.axes is None else rule.axes
        if len(axes) != len(shape):
            run.problems.append(f"{name} {tuple(shape)}: rule {rule.pattern!r} has {len(axes)} axes")
            continue
        dims = tuple(run.dim(axis, size, rule.parts) for axis, size in zip(axes, shape, strict=True))
        run.problems += _collisions(name, shape, dims)
        placed[name] = TensorPlacement(name, tuple(shape), dims, rule)
    run.problems += [
        f"rule {rule.pattern!r} matches nothing; mend or remove it"
        for i, rule in enumerate(table.rules)
        if i not in used and not rule.optional
    ]
    if run.problems:
        problems = list(dict.fromkeys(run.problems))
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ShardingRuleError(f"the sharding rules of {table.family} do not fit, {len(problems)} problems:\n{listed}")
    return placed


def _problems_of_axes(
    table: RuleTable, mesh_shape: Mapping[str, int], logical_axes: Mapping[str, str | None]
) -> list[str]:
    known = f"expected one of {', '.join(MESH_AXES)}"
    problems = [f"mesh axis {axis!r}: {known}" for axis in mesh_shape if axis not in MESH_AXES]
    problems += [
        f"mesh axis {axis!r}: expected at least 1 device, got {number}"
        for axis, number in mesh_shape.items()
        if number < 1
    ]
    problems += [
        f"logical axis {name!r} on mesh axis {axis!r}: {known}"
        for name, axis in logical_axes.items()
        if axis is not None and axis not in MESH_AXES
    ]
    named = {axis for rule in table.rules for axis in rule.axes or () if axis is not None} | table.pads
    unknown = sorted(named - set(logical_axes) - set(FUSED_AXES))
    listed = ", ".join([*logical_axes, *FUSED_AXES])
    return problems + [f"logical axis {axis!r}: expected one of {listed}" for axis in unknown]


def _collisions(name: str, shape: Sequence[int], dims: Sequence[DimLayout]) -> list[str]:
    divided = [dim.mesh_axis for dim in dims if dim.mesh_axis is not None]
    return [
        f"{name} {tuple(shape)}: {divided.count(axis)} dimensions on mesh axis {axis!r}, expected at most one"
        for axis in dict.fromkeys(divided)
        if divided.count(axis) > 1
    ]
