"""Published memory and rates of accelerators, one entry for each JAX device.

Sources: Google Cloud's pages of TPU v4, v5e, v5p, v6e and TPU7x (memory, bandwidth and peak of a chip; TPU7x is two
devices a chip), NVIDIA's data sheets of H100 SXM, H200 SXM and HGX B200 (peaks without sparsity). Usable memory is what
the compiler itself grants on TPUs; on GPUs it is what the device has less a twentieth for context and fragmentation.
"""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError

GIB = 2**30
GPU_PART = 0.95


@dataclass(frozen=True)
class Chip:
    """One JAX device.

    Attributes:
        name: Name as in a topology, such as ``v6e``.
        platform: "tpu", "gpu" or "cpu".
        memory_bytes: Bytes that a program and its arguments may use.
        bytes_per_s: Memory bandwidth; None for a CPU.
        flops_per_s: Peak rate in bfloat16 with sums in float32; None for a CPU.
        devices_per_chip: Number of JAX devices in a chip.
        topologies: Usual topologies, the smallest first.
        config: libtpu's options for the chip; a v4 has two cores for libtpu and is one device for JAX.
        multiplies_fp8: Whether products of float8 are faster than those of bfloat16.
    """

    name: str
    platform: str
    memory_bytes: int
    bytes_per_s: float | None
    flops_per_s: float | None
    devices_per_chip: int = 1
    topologies: tuple[str, ...] = ()
    config: str = "default"
    multiplies_fp8: bool = False


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", int(30.75 * GIB), 1228e9, 275e12, 1, ("2x2x1", "2x2x2", "2x2x4", "2x4x4"), "megacore"),
        Chip("v5e", "tpu", int(15.75 * GIB), 819e9, 197e12, 1, ("2x2", "2x4", "4x4", "4x8", "8x8")),
        Chip("v5p", "tpu", int(94.75 * GIB), 2765e9, 459e12, 1, ("2x2x1", "2x2x2", "2x2x4", "2x4x4")),
        Chip("v6e", "tpu", int(31.25 * GIB), 1638e9, 918e12, 1, ("2x2", "2x4", "4x4", "4x8", "8x8")),
        Chip(
            "tpu7x",
            "tpu",
            int(94.75 * GIB),
            3690e9,
            1153.5e12,
            2,
            ("2x2x1", "2x2x2", "2x2x4", "2x4x4"),
            multiplies_fp8=True,
        ),
        Chip("h100", "gpu", int(80e9 * GPU_PART), 3350e9, 989e12, 1, ("1", "2", "4", "8"), multiplies_fp8=True),
        Chip("h200", "gpu", int(141e9 * GPU_PART), 4800e9, 989e12, 1, ("1", "2", "4", "8"), multiplies_fp8=True),
        Chip("b200", "gpu", int(180e9 * GPU_PART), 7700e9, 2250e12, 1, ("1", "2", "4", "8"), multiplies_fp8=True),
    )
}


def chip_of(topology: str) -> Chip:
    """Returns the chip of ``v6e:2x4`` or ``h200:8``.

    Raises:
        InvalidArgumentError: There is no such chip; lists those that there are.
    """
    name, _, number = topology.partition(":")
    if name in CHIPS:
        return CHIPS[name]
    if name == "cpu" and number.isdigit() and int(number):
        from model_adapters.loading.memory import free_host_bytes  # imports jax

        return Chip("cpu", "cpu", free_host_bytes() // int(number), None, None, 1, ("8",))
    listed = "; ".join(f"{chip.name}:{', '.join(chip.topologies)}" for chip in CHIPS.values()) + "; cpu:<number>"
    raise InvalidArgumentError(f"topology: expected one of {listed}; got {topology!r}")


def check_shape(topology: str, shape: str) -> list[int]:
    """Returns the numbers of a shape such as ``2x4``.

    Raises InvalidArgumentError for anything else, naming the topology.
    """
    chip = chip_of(topology)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise InvalidArgumentError(
            f"topology: expected {chip.name}:<shape> such as {chip.name}:{chip.topologies[0]} or "
            f"{chip.name}:{chip.topologies[-1]}, got {topology!r}"
        )
    return [int(size) for size in shape.split("x")]


def num_devices(topology: str) -> int:
    """Returns the number of JAX devices of a topology such as ``v6e:2x4``.

    Raises InvalidArgumentError if it is no topology.
    """
    name, _, number = topology.partition(":")
    if name == "cpu" and number.isdigit():
        return int(number)
    return chip_of(topology).devices_per_chip * math.prod(check_shape(topology, topology.partition(":")[2]))


def check_compiler(topology: str) -> None:
    """Checks that the compiler of ``v6e:2x4`` or ``h200:8`` is installed, without importing it.

    A topology of another kind passes; `chip_of` refuses it if there is no such chip.

    Raises:
        UnsupportedArgumentError: It is not installed; the message names the extra to install.
    """
    chip = CHIPS.get(topology.partition(":")[0])
    platform = None if chip is None else chip.platform
    if platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise UnsupportedArgumentError(
            f"topology {topology!r}: expected libtpu, the TPU's compiler, which is not installed; "
            "pip install 'torchax-serve[plan]'"
        )
    if platform == "gpu" and not _has_cuda_plugin():
        raise UnsupportedArgumentError(
            f"topology {topology!r}: expected JAX's plug-in for CUDA, which is not installed; "
            "pip install 'torchax-serve[cuda]'"
        )


def _has_cuda_plugin() -> bool:
    try:
        return any(importlib.util.find_spec(f"jax_plugins.{name}") is not None for name in ("xla_cuda13", "xla_cuda12"))
    except ModuleNotFoundError:
        return False
