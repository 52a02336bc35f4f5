"""The compatibility module against torch's operator tables and plain torch."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

from model_adapters.bridge import views
from pytree_registry import torchax_import

PACKET = type(torch.ops.aten.add)


FRESH = """
import torch
packet = type(torch.ops.aten.add)
before = packet.__getattr__
early = {name: getattr(torch.ops.aten.prod, name) for name in torch.ops.aten.prod.overloads()}
from pytree_registry import torchax_import
from pytree_registry.torchax_import import import_torchax

torchax = import_torchax()
assert packet.__getattr__ is before
assert import_torchax() is torchax
try:
    torch.ops.aten.prod.dim_no_such_name
except AttributeError as error:
    print(error)

# torchax finds an operator by the overload object, so a second object for one overload would be a lost operator.
assert all(getattr(torch.ops.aten.prod, name) is overload for name, overload in early.items())
overloads = [key for key in torchax.default_env()._decomps if isinstance(key, torch._ops.OpOverload)]
print(len(overloads), [str(key) for key in overloads if getattr(key.overloadpacket, key._overloadname) is not key])
"""


def test_torchax_imports_in_a_fresh_interpreter_and_leaves_torch_as_it_was():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refusal, table = done.stdout.splitlines()
    assert "dim_no_such_name" in refusal
    number, strays = table.split(" ", 1)
    assert int(number) > 300
    assert strays == "[]"


@pytest.mark.parametrize(
    "op",
    [
        lambda x, i: torch.ops.aten.prod.dim_int(x, 1),
        lambda x, i: torch.ops.aten.all.dim(x > 0, 1),
        lambda x, i: torch.ops.aten.index_copy.default(x, 0, i, x[:1]),
        lambda x, i: torch.ops.aten.index_add.default(x, 0, i, x[:1]),
        lambda x, i: torch.ops.aten.index_fill.int_Scalar(x, 0, i, 3.0),
        lambda x, i: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1]),
        lambda x, i: torch.ops.aten.std.correction(x, [1], correction=1),
        lambda x, i: torch.ops.aten.std_mean.correction(x, [1], correction=1),
        lambda x, i: torch.ops.aten.unbind.int(x, 0),
        lambda x, i: torch.ops.aten.addmm.default(x[0], x, x.t().contiguous()[:, :3] @ x[:3]),
        lambda x, i: torch.ops.aten.native_layer_norm.default(x, [4], None, None, 1e-5)[0],
    ],
)
def test_an_operator_of_each_touched_kind_computes_as_torch_does(op):
    data = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    expected = op(torch.from_numpy(data.copy()), torch.tensor([1]))
    with views.torchax.default_env():
        got = views.jax_view(op(*views.torch_view((jax.numpy.asarray(data), jax.numpy.array([1])))))
    for one, other in zip(*(v if isinstance(v, tuple | list) else [v] for v in (got, expected)), strict=True):
        np.testing.assert_allclose(np.asarray(one), other.numpy(), rtol=1e-6, atol=1e-6)


def test_patch_answers_missing_overloads_of_names_with_the_cached_object_only_inside():
    packet = torch.ops.aten.prod
    with torchax_import._missing_named_overloads_answered():
        answered = packet.no_such_dimname
        assert answered is getattr(packet, packet.overloads()[0])
        assert packet.dim_int is torch.ops.aten.prod.dim_int
        with pytest.raises(AttributeError):
            _ = packet.no_such_overload
        with pytest.raises(AttributeError):
            _ = packet.__no_such_name__
    with pytest.raises(AttributeError):
        _ = packet.no_such_dimname


def test_an_operator_that_torch_has_removed_is_answered_only_inside(monkeypatch):
    monkeypatch.setattr(torchax_import, "REMOVED", frozenset({"no_such_operator"}))
    with torchax_import._missing_named_overloads_answered():
        found = torch.ops.aten.no_such_operator
        assert found.default is found and hash(found)
        assert not isinstance(found, PACKET)
        assert torch.ops.aten.add is not found
        with pytest.raises(AttributeError):
            _ = torch.ops.aten.another_such_operator
    with pytest.raises(AttributeError):
        _ = torch.ops.aten.no_such_operator


def test_patch_is_removed_when_the_import_fails(monkeypatch):
    before = PACKET.__getattr__

    def broken(name):
        raise ImportError(f"{name} is broken")

    monkeypatch.setattr(torchax_import.importlib, "import_module", broken)
    with pytest.raises(ImportError, match="torchax is broken"):
        torchax_import.import_torchax()
    assert PACKET.__getattr__ is before


@pytest.mark.parametrize("has_overloads", [True, False])
def test_torch_is_touched_only_where_it_lacks_the_overloads(monkeypatch, has_overloads):
    before = PACKET.__getattr__
    seen = []
    monkeypatch.setattr(torchax_import, "torch_has_named_overloads", lambda: has_overloads)
    monkeypatch.setattr(
        torchax_import.importlib, "import_module", lambda name: seen.append(PACKET.__getattr__ is before)
    )
    torchax_import.import_torchax()
    assert seen == [has_overloads] * (1 + len(torchax_import.LATE))


def test_named_overloads_are_looked_up_in_torch():
    # torch 2.13 dropped the overloads of named tensors; 2.11 and 2.12 still have them.
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert torchax_import.torch_has_named_overloads() == (version < (2, 13))
