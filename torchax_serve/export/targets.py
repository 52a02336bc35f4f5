"""Platforms that a bundle is exported for, whether or not their devices are here."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
from torchax_serve.planning.chips import CHIPS
from torchax_serve.planning.topology import compiling_for, describe

PLATFORMS = {"cpu": "cpu", "tpu": "tpu", "cuda": "gpu"}
"""Platforms by JAX's names, with those of the registry of ops."""


@dataclasses.dataclass(frozen=True)
class ExportTarget:
    """A platform that programs are exported for.

    Attributes:
        platform: ``cpu``, ``tpu`` or ``cuda``.
        chip: Name of the chip, such as ``v6e``; None on a CPU.
        uses_kernels: Whether the programs call kernels; those without run everywhere, and slower.
    """

    platform: str
    chip: str | None = None
    uses_kernels: bool = True

    @property
    def name(self) -> str:
        """Name of the folder of its programs."""
        return "-".join([self.chip or self.platform, *([] if self.uses_kernels else ["reference"])])

    @contextlib.contextmanager
    def tracing(self, here: jax.sharding.Sharding | None) -> Iterator[jax.sharding.Sharding | None]:
        """Traces for the platform in this context.

        Yields where arguments are said to be (None: anywhere).

        Args:
            here: Where they are on a mesh of this process; None: the model is on one device, or none.
        """
        with contextlib.ExitStack() as stack:
            if not self.uses_kernels:
                stack.enter_context(registry.use_references())
            if self.chip is None or here is not None:
                yield here
                return
            chip, devices = describe(f"{self.chip}:{CHIPS[self.chip].topologies[0]}")
            mesh = jax.sharding.Mesh(np.array(devices[:1]), ("model",))
            stack.enter_context(jax.set_mesh(mesh))  # kernels ask it for the chip
            stack.enter_context(compiling_for(chip))
            yield jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def parse_platforms(names: Sequence[str]) -> list[ExportTarget]:
    """Returns the targets of platforms such as ``cpu``, ``tpu:v6e`` and ``cuda:h100``.

    Raises:
        InvalidArgumentError: an unknown platform or chip, or one that is named twice.
    """
    targets = [_parse(name.strip()) for name in names]
    if not targets:
        raise InvalidArgumentError("platforms: expected one or more, got none; such as cpu")
    if len(set(targets)) < len(targets):
        raise InvalidArgumentError(f"platforms: expected each one once, got {', '.join(names)}; name it once")
    return targets


def _parse(name: str) -> ExportTarget:
    platform, _, chip = name.partition(":")
    if name == "cpu":
        return ExportTarget("cpu")
    chips = [each for each, found in CHIPS.items() if found.platform == PLATFORMS.get(platform)]
    if chip in chips:
        return ExportTarget(platform, chip)
    listed = ", ".join(f"{kind}:{each}" for kind in ("tpu", "cuda") for each in _chips_of(kind))
    raise InvalidArgumentError(f"platforms: expected cpu or one of {listed}; got {name!r}")


def _chips_of(platform: str) -> list[str]:
    return [name for name, chip in CHIPS.items() if chip.platform == PLATFORMS[platform]]
