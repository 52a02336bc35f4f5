"""Describes devices that need not be present, as their compilers do."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from model_adapters.ops import on_platform
from torchax_serve.planning.chips import Chip, check_compiler, check_shape, chip_of
from torchax_serve.planning.gpu_targets import target_config

# Asked for when libtpu is loaded, whatever is compiled for later; without them it looks for a real TPU on the network.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def describe(topology: str) -> tuple[Chip, list[Any]]:
    """Returns the chip and the devices of ``v6e:2x4`` or ``h200:8``.

    Raises:
        InvalidArgumentError: The topology is unknown.
        TorchaxServeError: The compiler is not installed; names the extra to install.
    """
    chip = chip_of(topology)
    sizes = check_shape(topology, topology.partition(":")[2])
    check_compiler(topology)
    number = math.prod(sizes)
    if chip.platform == "cpu":
        return chip, _cpu(number)
    return chip, _tpu(topology, chip) if chip.platform == "tpu" else _gpu(chip, number)


def _cpu(number: int) -> list[Any]:
    """Returns `number` CPU devices; sets their number if JAX has not started yet."""
    with contextlib.suppress(RuntimeError):  # it has
        jax.config.update("jax_num_cpu_devices", number)
    devices = jax.devices("cpu")
    if len(devices) < number:
        raise InvalidArgumentError(
            f"topology: expected at most cpu:{len(devices)}, the devices that this process has begun with, got "
            f"cpu:{number}; ask in a new process"
        )
    return devices[:number]


def _tpu(topology: str, chip: Chip) -> list[Any]:
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu", chip_config_name=chip.config).devices)
    except Exception as error:  # libtpu raises whatever its status says
        usual = ", ".join(f"{chip.name}:{shape}" for shape in chip.topologies)
        raise InvalidArgumentError(
            f"topology: expected one that libtpu knows, such as {usual}; got {topology!r} "
            f"({str(error).splitlines()[0][:120]})"
        ) from error


def _gpu(chip: Chip, number: int) -> list[Any]:
    _tune_nothing()
    described = target_config(chip.name)
    try:
        found = topologies.get_topology_desc("", platform="cuda", target_config=described, topology=f"1x1x{number}")
    except (NotImplementedError, RuntimeError) as error:  # the plug-in has looked for a driver
        raise TorchaxServeError(
            f"topology '{chip.name}:{number}': expected JAX's plug-in for CUDA to describe devices, got "
            f"{str(error).splitlines()[0]}; set JAX_PLATFORMS=cpu before jax is imported"
        ) from error
    return list(found.devices)


def _tune_nothing() -> None:
    """Turns off autotuning, which needs a device, unless the user has set a level.

    Other flags stay as they are.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".lstrip()


@contextlib.contextmanager
def compiling_for(chip: Chip) -> Iterator[None]:
    """Traces and compiles for devices like `chip` in this context.

    The shardings of a step's arguments determine the devices.
    """
    with on_platform(chip.platform):
        yield


def lowering_platform(chip: Chip) -> str:
    """Returns JAX's name of the chip's platform."""
    return "cuda" if chip.platform == "gpu" else chip.platform


@functools.cache
def bytes_in_memory(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> int:
    """Returns the bytes that an array takes on a device, with what fills its tiles on a TPU.

    Which axes lie along a tile, and how large it is, is the compiler's choice by shape, so that it is asked.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.platform != "tpu" or not num_bytes:
        return num_bytes
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
    traced = jax.jit(lambda _: 0, keep_unused=True).trace(array)
    found: int = traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis().argument_size_in_bytes
    return found
