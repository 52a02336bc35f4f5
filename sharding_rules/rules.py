"""Which dimension of which tensor lies on which axis of the device mesh: rules as data.

Two steps, as in JAX's larger language-model codebases. A *rule* names the dimensions of the tensors whose whole name
its pattern matches, by *logical axes* (``("heads", "embed")``). One small map then sends logical axes to *mesh axes*:

* ``data``: replicas of the model, each with its part of the batch;
* ``model``: tensor parallelism, the heads, the hidden units of the MLP and the vocabulary are divided;
* ``expert``: the experts of a mixture are divided.

That a pattern must match the full name, that the first match wins, and that unused rules are reported, is learned from
Qwix (https://github.com/google/qwix), where quantization is described in this way. Here unused rules and unmatched
tensors are errors, and all that is wrong is said at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

MESH_AXES = ("data", "model", "expert")

# None: every device has the whole dimension.
LOGICAL_AXES: Mapping[str, str | None] = {
    "batch": "data",
    "vocab": "model",
    "embed": None,
    "heads": "model",  # query heads times head_dim
    "kv_heads": "model",  # key or value heads times head_dim
    "fused_qkv": None,  # a cut by devices would not fall between queries, keys and values
    "mlp": "model",
    "experts": "expert",
}


class ShardingRuleError(ValueError):
    """A rule table that does not fit a model or a mesh; lists everything that is wrong."""


@dataclass(frozen=True)
class Rule:
    """The logical axes of the tensors with a name of one form.

    Attributes:
        pattern: regular expression for the whole name.
        axes: a logical axis, or None for a dimension that is never divided, for each dimension; None instead of
            them all for tensors of any rank that every device has whole.
        optional: whether a model of the family may have no such tensor; any other rule must be used.
    """

    pattern: str
    axes: tuple[str | None, ...] | None
    optional: bool = False


@dataclass(frozen=True)
class RuleTable:
    """The rules of a family of architectures, the first that matches counts.

    Attributes:
        family: name in messages.
        rules: in order of precedence.
        whole_if_uneven: logical axes that stay undivided where the mesh axis does not divide their size; elsewhere that
            is an error.
    """

    family: str
    rules: tuple[Rule, ...]
    whole_if_uneven: frozenset[str] = field(default_factory=frozenset)


def specs_for(
    table: RuleTable,
    shapes: Mapping[str, Sequence[int]],
    mesh_shape: Mapping[str, int],
    logical_axes: Mapping[str, str | None] = LOGICAL_AXES,
) -> dict[str, PartitionSpec]:
    """The partition of every tensor of a model.

    Args:
        table: rules of the model's family.
        shapes: shape by qualified name, of all tensors.
        mesh_shape: number of devices by mesh axis; a mesh axis that is not named has one device.
        logical_axes: mesh axis by logical axis.

    Returns:
        A spec with one entry per dimension, by name.

    Raises:
        ShardingRuleError: unmatched tensors, unused rules, ranks that differ, axes that nobody knows, two dimensions on
            one mesh axis, sizes that cannot be divided evenly; all of them.
    """
    problems = _problems_of_axes(table, mesh_shape, logical_axes)
    used: set[int] = set()
    specs = {}
    for name, shape in shapes.items():
        number = next((i for i, rule in enumerate(table.rules) if re.fullmatch(rule.pattern, name)), None)
        if number is None:
            problems.append(f"{name} {tuple(shape)}: no rule matches; add one")
            continue
        used.add(number)
        axes = table.rules[number].axes
        if axes is None:
            axes = (None,) * len(shape)
        if len(axes) != len(shape):
            problems.append(f"{name} {tuple(shape)}: rule {table.rules[number].pattern!r} has {len(axes)} axes")
            continue
        placed = [_place(axis, size, table, mesh_shape, logical_axes) for axis, size in zip(axes, shape, strict=True)]
        problems += _problems_of_placement(name, shape, placed, mesh_shape)
        specs[name] = PartitionSpec(*placed)
    problems += [
        f"rule {rule.pattern!r} matches nothing; mend or remove it"
        for i, rule in enumerate(table.rules)
        if i not in used and not rule.optional
    ]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ShardingRuleError(f"the sharding rules of {table.family} do not fit, {len(problems)} problems:\n{listed}")
    return specs


def _place(
    axis: str | None,
    size: int,
    table: RuleTable,
    mesh_shape: Mapping[str, int],
    logical_axes: Mapping[str, str | None],
) -> str | None:
    """The mesh axis of a dimension of `size`; None where it is whole on every device."""
    mesh_axis = logical_axes.get(axis) if axis is not None else None
    num_devices = mesh_shape.get(mesh_axis, 1) if mesh_axis is not None else 1
    if num_devices == 1 or (size % num_devices and axis in table.whole_if_uneven):
        return None
    return mesh_axis


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
    named = {axis for rule in table.rules for axis in rule.axes or () if axis is not None} | table.whole_if_uneven
    unknown = sorted(named - set(logical_axes))
    return problems + [f"logical axis {axis!r}: expected one of {', '.join(logical_axes)}" for axis in unknown]


def _problems_of_placement(
    name: str, shape: Sequence[int], placed: Sequence[str | None], mesh_shape: Mapping[str, int]
) -> list[str]:
    divided = [axis for axis in placed if axis is not None]
    problems = [
        f"{name} {tuple(shape)}: {divided.count(axis)} dimensions on mesh axis {axis!r}, expected at most one"
        for axis in dict.fromkeys(divided)
        if divided.count(axis) > 1
    ]
    return problems + [
        f"{name} {tuple(shape)}: dimension {i} is not divisible by the {mesh_shape[axis]} devices of mesh axis {axis!r}"
        for i, axis in enumerate(placed)
        if axis is not None and shape[i] % mesh_shape[axis]
    ]
