"""Pathways: JAX is told of it before it looks for devices, and replicas lie in slices."""

import dataclasses
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from model_adapters.ops import registry
from torchax_serve.distributed import mesh, pathways

ROOT = Path(__file__).parents[2]


@pytest.fixture
def proxied():
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "proxy,cpu")
    yield
    jax.config.update("jax_platforms", before)


def test_pathways_is_initialised_where_jax_says_proxy(proxied, monkeypatch):
    calls = []
    monkeypatch.setitem(
        sys.modules, "pathwaysutils", types.SimpleNamespace(initialize=lambda: calls.append("initialize"))
    )
    pathways.connect()
    assert calls == ["initialize"]
    jax.config.update("jax_platforms", "cpu")
    pathways.connect()
    assert calls == ["initialize"]


def test_a_missing_package_is_named(proxied, monkeypatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(TorchaxServeError, match=r"expected pathwaysutils .* pip install 'torchax-serve\[pathways\]'"):
        pathways.connect()


def test_serve_connects_before_jax_looks_for_devices():
    """In a process of its own, as this one has its devices."""
    code = """
import sys, types
import jax
jax.config.update("jax_platforms", "proxy")
import torchax_serve
from jax._src import xla_bridge
class Connected(Exception): pass
def initialize():
    assert not xla_bridge._backends
    raise Connected
sys.modules["pathwaysutils"] = types.SimpleNamespace(initialize=initialize)
try:
    torchax_serve.serve()
except Connected:
    print("connected")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.stdout.strip() == "connected", found.stderr[-2000:]


def test_kernels_behind_the_proxy_are_those_of_tpus(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "proxy")
    assert registry.platform() == "tpu"


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh needs of a device."""

    id: int
    slice_index: int


def devices(*slices):
    """Devices of the slices given."""
    return [Device(number, index) for number, index in enumerate(slices)]


def test_replicas_lie_in_slices():
    found = mesh.mesh_across_slices(devices(0, 1, 0, 1, 1, 0, 1, 0), {"data": 4, "model": 2})
    assert dict(found.shape) == {"data": 4, "model": 2, "expert": 1}
    by_replica = [{device.slice_index for device in replica.flat} for replica in found.devices]
    assert by_replica == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize(
    ("slices", "shape"), [((0, 0, 1, 1), {"model": 4}), ((0, 0, 1), {"data": 3}), ((0, 1, 2, 2), {"data": 4})]
)
def test_only_data_goes_across_slices(slices, shape):
    with pytest.raises(InvalidArgumentError, match="expected data to be a multiple of the"):
        mesh.mesh_across_slices(devices(*slices), shape)
