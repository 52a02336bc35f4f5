"""Run as a program, with two CPU devices: TPU kernels of recurrent layers, each device's heads in interpret mode."""

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from recurrent_oracle import (
    assert_near,
    delta_layer,
    empty_pool,
    expected_of,
    normal,
    recurrence_layer,
    scan_layer,
    space_layer,
    table,
)

from model_adapters.ops import registry, spmd

LAYERS = {
    "delta": delta_layer(dim=8, width=16),
    "delta, one key head": delta_layer(key_heads=1, dim=8, width=16),
    "delta, three heads": delta_layer(key_heads=1, heads=3, dim=8, width=16),
    "space": space_layer(heads=4, dim=8),
    "space, one group": space_layer(heads=4, groups=1, dim=8),
    "scan": scan_layer(dim=24),
    "scan, three channels": scan_layer(dim=3),
    "recurrence": recurrence_layer(channels=6),
}


def check(layer, mesh):
    """A step is that of a loop, and states stay where they are; returns the implementations used."""
    segments = table([0, 1, 4, 5], [0, 1, 2], [0, 1, 3], [True, False, True], [0, 1, 2], 3)
    tokens, rng = layer.tokens(np.random.default_rng(0), 5), np.random.default_rng(1)
    pool = empty_pool(layer, {row: normal(rng, *layer.row) for row in (0, 2)})
    expected, written, after = expected_of(layer, tokens, segments, pool)
    placed = NamedSharding(mesh, spmd.pool_spec(layer.row[0], mesh))
    with spmd.on_mesh(mesh), registry.on_platform("tpu"), registry.record_calls() as record:
        out, got = layer.jitted()(tokens, jax.device_put(pool, placed), segments)
    assert_near(out, expected)
    for row in written:
        assert_near(got[row], after[row])
    assert got.sharding.is_equivalent_to(placed, got.ndim)
    return sorted(name for _, name in record)


if __name__ == "__main__":
    mesh = Mesh(np.array(jax.devices()), ("model",))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        for name, layer in LAYERS.items():
            print(name, check(layer, mesh), sep=": ")
