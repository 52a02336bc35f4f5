"""A program of replicas on two described slices: only the axis `data` goes across them."""

import re

import jax
import jax.numpy as jnp
import tpu_shapes  # noqa: F401 asks libtpu not to look for a TPU
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from torchax_serve.distributed.mesh import mesh_across_slices


def test_data_goes_across_slices_and_model_stays_within():
    described = topologies.get_topology_desc("v6e:2x2", platform="tpu", num_slices=2).devices
    assert {device.slice_index for device in described} == {0, 1}
    mesh = mesh_across_slices(described, {"data": 2, "model": 4})
    assert [{device.slice_index for device in replica.flat} for replica in mesh.devices] == [{0}, {1}]

    def shape(sizes, *axes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    def layer(x, up, down):
        return (x @ up) @ down

    args = shape((64, 1024), "data"), shape((1024, 4096), None, "model"), shape((4096, 1024), "model", None)
    text = jax.jit(layer, out_shardings=args[0].sharding).lower(*args).compile().as_text()
    # Sums go over the four devices of the axis `model`, numbered within their slice.
    assert set(re.findall(r"replica_groups=(\S+?),?\s", text)) == {"{{0,1,2,3}}"}
