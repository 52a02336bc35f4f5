"""What a start imports, and that the cycle collector does not walk it again and again."""

import gc
import subprocess
import sys

import pytest
from thorough import thorough

from model_adapters.ops import registry
from torchax_serve.compilation import gc_pause


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_package_alone_imports_none_of_the_heavy_libraries():
    code = "import sys, torchax_serve; print(*{name.partition('.')[0] for name in sys.modules})"
    assert not {"torch", "jax", "transformers", "torchax", "rich", "numpy"} & set(run(code))


def test_serving_imports_no_kernels_of_other_platforms_and_collects_nothing():
    code = """
import gc, sys
before = gc.get_stats()[2]["collections"]
from torchax_serve import serve
print(gc.get_stats()[2]["collections"] - before, gc.isenabled(), gc.get_freeze_count())
unneeded = ("jax.experimental.pallas", "torchvision", "sklearn", "pandas")
print(*(name for name in sys.modules if name in unneeded))
"""
    assert run(code) == ["0", "True", "0"]


AS_IT_WAS = """
import os
import jax, torch, transformers.modeling_utils  # which set variables of the environment themselves

def forked():
    with torch.random.fork_rng():
        return "works"

def said():
    found = []
    for ask in (
        torch.get_device_module, torch.accelerator.current_accelerator, torch.accelerator.device_count,
        torch.accelerator.is_available, forked, lambda: torch.Stream().device, lambda: torch.device("jax"),
        torch._C._get_privateuse1_backend_name, torch.backends.mha.get_fastpath_enabled, lambda: sorted(os.environ),
        lambda: sorted(name for name in dir(torch) if name in ("jax", "privateuseone")), torch.get_default_device,
        lambda: torch.nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2)),
    ):
        try:
            found.append(str(ask()))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found

before = said()
import torchax_serve
encoder = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
weights, function = torchax_serve.extract_jax(encoder)
x = torch.randn(1, 3, 8)
found = torch.tensor(function(weights, (x.numpy(),)).tolist())
assert torch.allclose(found, encoder(x).detach(), atol=1e-5)
print(*(f"{one} became {other}" for one, other in zip(before, said()) if one != other))
"""


def test_a_model_on_jax_leaves_pytorch_as_it_was():
    assert run(AS_IT_WAS) == []


SCRIPT = """
import torch
import torchax_serve

torchax_serve.extract_jax(torch.nn.Linear(2, 2))
{}
module = torch.nn.Linear(2, 3)
x = torch.ones(1, 2)
expected = module(x).tolist()
with torchax.default_env(), torch.no_grad():
    found = module.to("jax")(x.to("jax"))
assert torch.allclose(torch.tensor(found.tolist()), torch.tensor(expected))
weights, function = torchax_serve.extract_jax(torch.nn.Linear(2, 2))
print(found.device, torch.device("jax").type, function(weights, (x.numpy(),)).shape, torch.jax.__name__)
"""


@pytest.mark.parametrize("statement", ["import torchax", "from pytree_registry.torchax_import import *"])
def test_a_script_that_uses_torchax_itself_has_its_device(statement):
    code = SCRIPT.format(statement if "pytree" not in statement else statement + "\ntorchax = import_torchax()")
    assert run(code) == ["jax:0", "jax", "(1,", "2)", "torchax.device_module"]


@pytest.fixture
def nothing_frozen():
    """What an earlier test of this process may have left, such as one that starts a server."""
    gc.unfreeze()


def test_what_imports_make_counts_as_old(nothing_frozen):
    with gc_pause.paused_for_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert any(made is each for each in gc.get_objects(generation=2))


def test_frozen_objects_of_the_caller_stay_frozen(nothing_frozen):
    kept = []
    gc.freeze()
    try:
        with gc_pause.paused_for_imports():
            pass
        assert not any(kept is each for each in gc.get_objects())  # which lists what collections see
    finally:
        gc.unfreeze()
    assert any(kept is each for each in gc.get_objects())


@pytest.fixture
def collector_is_as_it_was():
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize(
    ("young", "expected"), [(700, gc_pause.YOUNG_THRESHOLD), thorough(10**6, 10**6), thorough(0, 0)]
)
def test_a_process_that_serves_walks_nothing_old_and_little_young(young, expected, collector_is_as_it_was):
    kept = []
    gc.set_threshold(young, 10, 10)
    gc_pause.freeze_for_serving()
    assert gc.get_threshold() == (expected, 10, 10)
    assert not any(kept is each for each in gc.get_objects())  # which lists what collections see


@pytest.fixture
def provider(tmp_path, monkeypatch):
    """A module with an implementation of an op, for the platform tpu."""
    (tmp_path / "kernels_of_a_test.py").write_text(
        "import jax.numpy as jnp\n"
        "from model_adapters.ops import registry\n"
        "TWO = jnp.float32(2)\n"
        "registry.register('twice', 'fast', ('tpu',))(lambda x: x * TWO)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_OPS", {})
    registry.define("twice", "twice")(lambda x: x + x)
    registry.register_module("twice", "tpu", "kernels_of_a_test")
    yield "kernels_of_a_test"
    sys.modules.pop("kernels_of_a_test", None)


def test_kernels_are_imported_on_their_platform_alone(provider):
    import jax

    with registry.on_platform("cpu"):
        assert registry.implementation_for("twice", 1.0).name == registry.REFERENCE
    assert provider not in sys.modules

    def traced(x):
        with registry.on_platform("tpu"):
            assert registry.implementation_for("twice", x).name == "fast"
            return registry.call("twice", x)

    assert jax.jit(traced)(3.0) == 6.0
    assert not isinstance(sys.modules[provider].TWO, jax.core.Tracer)  # the import was no part of the trace


def test_asking_for_an_op_by_name_knows_all_implementations(provider):
    assert [each.name for each in registry.find("twice").implementations] == [registry.REFERENCE, "fast"]
