"""The number of tokens that a configuration's positions are for; plain Python."""

from __future__ import annotations

from typing import Any

BEYOND = frozenset({"linear", "dynamic", "yarn", "longrope", "llama3"})
"""Types of rotary embeddings for sequences longer than those of a model's first training."""


def max_positions(config: Any) -> int | None:
    """Returns the number of tokens that the `config` of a text model makes room for.

    Takes the type of rotary embeddings into account. None if the configuration does not say.
    """
    first = _first_positions(config)
    return None if first is None else max([first, *(_room(rope, first) for rope in _extending(config))])


def has_end(config: Any) -> bool:
    """Tells whether more tokens than `max_positions` are an error.

    Extended rotary embeddings have no last position.
    """
    return not _extending(config)


def has_table_of_distances(config: Any) -> bool:
    """Tells whether the code makes biases for only `max_positions` distances.

    If so, no more keys can be attended to.
    """
    return getattr(config, "model_type", None) == "mpt"


def _first_positions(config: Any) -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        positions = getattr(config, "max_seq_len", None)  # of MPT
    return positions if isinstance(positions, int) and positions > 0 else None  # -1: no end


def _extending(config: Any) -> list[dict[str, Any]]:
    """Returns the parameters of rotary embeddings that extend to longer sequences.

    The list has one entry per layer type where the parameters differ.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [rope for rope in nested or [parameters] if (rope.get("rope_type") or rope.get("type")) in BEYOND]


def _room(rope: dict[str, Any], first: int) -> int:
    scale = rope.get("alpha") or rope.get("factor") or 1  # Hunyuan's dynamic type has a factor of 1 and an alpha
    return int(scale * (rope.get("original_max_position_embeddings") or first))
