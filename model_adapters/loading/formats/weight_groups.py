"""Tensors of a checkpoint that are parts of one quantized weight, by name endings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class WeightGroup:
    """The tensors of one weight.

    Attributes:
        weight: Name that the weight has for transformers, such as "model.layers.0.mlp.up_proj.weight".
        tensors: Name in the files of each part, by its role.
        metadata: Words of the files' headers about it.
    """

    weight: str
    tensors: Mapping[str, str]
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def module(self) -> str:
        """Name of the module that has the weight."""
        return self.weight.rpartition(".")[0]


def groups_by_suffix(
    names: Iterable[str], marker: str, weight: str, required: Mapping[str, str], optional: Mapping[str, str]
) -> list[WeightGroup]:
    """Returns a group for each name that ends with `marker`.

    Args:
        names: Names of all tensors.
        marker: End of the name of the tensor that each quantized weight has; what comes before it is the stem.
        weight: End of the weight's name after the stem.
        required: Role and end of the name of the other parts; a missing one is left for the reader to report.
        optional: Likewise, of parts that not all checkpoints have. Names with "{module}" are not after the stem.
    """
    known = set(names)
    groups = []
    for name in sorted(known):
        if not name.endswith(marker):
            continue
        stem = name.removesuffix(marker)
        module = (stem + weight).rpartition(".")[0]
        tensors = {}
        for role, suffix in {**required, **optional}.items():
            found = suffix.format(module=module) if "{module}" in suffix else stem + suffix
            if found in known:
                tensors[role] = found
        groups.append(WeightGroup(stem + weight, tensors))
    return groups
