"""Transfer of host numbers to the device; imports no torch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

XLA_CPU_ALIGNMENT = 64
"""Alignment in bytes of a foreign buffer that XLA's CPU client takes without a copy."""


def to_device(values: Any, dtype: Any) -> jax.Array:
    """Returns the array of host numbers on the default device.

    Unlike ``jnp.asarray``, it compiles nothing.
    """
    return jax.device_put(np.asarray(values).astype(dtype))


def part_on(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns the part of `array` on the devices of `mesh`, which are some of its own.

    Nothing is copied; this host holds its own shards.
    """
    assert isinstance(array.sharding, NamedSharding)
    sharding = NamedSharding(mesh, array.sharding.spec)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    there = [shards[device] for device in sharding.mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, there)
