"""Transfer of host numbers to the device; imports no torch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

XLA_CPU_ALIGNMENT = 64
"""Alignment in bytes of a foreign buffer that XLA's CPU client takes without a copy."""


def to_device(values: Any, dtype: Any) -> jax.Array:
    """Returns the array of host numbers on the default device.

    Unlike ``jnp.asarray``, it compiles nothing.
    """
    return jax.device_put(np.asarray(values).astype(dtype))
