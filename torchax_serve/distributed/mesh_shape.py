"""Parsing and checks of mesh axis sizes.

The module imports neither jax nor torch, so that flags are checked at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from model_adapters.errors import InvalidArgumentError


def parse_mesh(text: str | None, num_devices: int | None) -> dict[str, int]:
    """Parses ``data=2,model=4`` as a mapping; None puts all devices on ``model``.

    With `num_devices` None the number of devices is not checked.

    Raises:
        InvalidArgumentError: An axis is unknown, or the sizes do not multiply to the number of devices.
    """
    if text is None:
        return {"data": 1, "model": num_devices or 1, "expert": 1}
    shape = {"data": 1, "model": 1, "expert": 1}
    for part in text.split(","):
        axis, _, number = part.partition("=")
        if axis.strip() not in shape:
            raise InvalidArgumentError(f"mesh: expected axes out of {', '.join(shape)}, got {axis.strip()!r}")
        if not number.strip().isdigit() or int(number) < 1:
            raise InvalidArgumentError(f"mesh: expected {axis.strip()}=<a positive number>, got {part.strip()!r}")
        shape[axis.strip()] = int(number)
    return shape if num_devices is None else check_mesh(shape, num_devices)


def check_mesh(shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Returns `shape` with all axes.

    Raises InvalidArgumentError unless its product is `num_devices`.
    """
    product = math.prod(shape.values())
    if product != num_devices:
        written = " x ".join(f"{axis} {size}" for axis, size in shape.items())
        relation = "more" if product > num_devices else "fewer"
        raise InvalidArgumentError(
            f"mesh: expected axes that multiply out to the {num_devices} devices, got {written} = {product}, "
            f"{relation} than there are; change an axis"
        )
    return dict(shape)
