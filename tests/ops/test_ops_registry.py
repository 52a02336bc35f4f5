"""How an implementation is chosen."""

import importlib
import pkgutil

import jax.numpy as jnp
import pytest

import model_adapters.ops as op_modules
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import list_ops, on_platform, registry, use


@pytest.fixture
def op(monkeypatch):
    monkeypatch.setattr(registry, "_OPS", {})
    registry.define("double", "twice x")(lambda x: ("reference", 2 * x))
    registry.register("double", "fast", ("cpu",), lambda x: "x is odd" if x % 2 else None)(lambda x: ("fast", 2 * x))
    registry.register("double", "tensor", ("tpu", "gpu"))(lambda x: ("tensor", 2 * x))
    return "double"


def test_the_platform_and_the_arguments_choose(op):
    assert registry.call(op, 2) == ("fast", 4)
    assert registry.call(op, 3) == ("reference", 6)
    with on_platform("tpu"):
        assert registry.call(op, 3) == ("tensor", 6)
    assert registry.platform() == "cpu"


def test_use_overrides_until_the_block_ends(op):
    with use(op, "tensor"):
        assert registry.call(op, 2) == ("tensor", 4)
        with use(op, "reference"):
            assert registry.call(op, 2) == ("reference", 4)
        assert registry.call(op, 2) == ("tensor", 4)
    assert registry.call(op, 2) == ("fast", 4)


def test_records_are_told_apart_by_identity_and_not_by_what_they_hold(op):
    """Threads enter and leave them in any order; at first all of them are empty."""
    for record, method in ((registry.record_calls, "add"), (registry.fallbacks, "append")):
        first, second = record(), record()
        earlier, later = first.__enter__(), second.__enter__()
        second.__exit__(None, None, None)
        registry.call(op, 3)
        assert earlier and not later
        getattr(later, method)(("double", "reference"))
        first.__exit__(None, None, None)


def test_an_implementation_asked_for_says_why_it_cannot(op):
    with use(op, "fast"), pytest.raises(InvalidArgumentError, match=r"'fast' of op 'double'.*x is odd"):
        registry.call(op, 3)


def test_unknown_names_list_the_known_ones(op):
    with pytest.raises(InvalidArgumentError, match=r"\(reference, fast, tensor\), got 'slow'"), use(op, "slow"):
        pass
    with pytest.raises(InvalidArgumentError, match="one of the ops double, got 'triple'"):
        registry.call("triple", 1)
    with pytest.raises(InvalidArgumentError, match="got 'abacus'"), on_platform("abacus"):
        pass
    with pytest.raises(InvalidArgumentError, match="defined already"):
        registry.define("double", "again")(lambda x: x)
    with pytest.raises(InvalidArgumentError, match="'fast' already"):
        registry.register("double", "fast", ("cpu",))(lambda x: x)
    with pytest.raises(InvalidArgumentError, match=r"got \['abacus'\]"):
        registry.register("double", "other", ("abacus",))


def test_every_op_has_a_reference_for_every_platform():
    ops = {op.name: op for op in list_ops()}
    names = (f"{op_modules.__name__}.{module.name}" for module in pkgutil.iter_modules(op_modules.__path__))
    modules = [importlib.import_module(name) for name in names]
    assert list(ops) == sorted({module.OP for module in modules if hasattr(module, "OP")})
    for op in ops.values():
        assert op.summary
        assert op.implementations[0].name == registry.REFERENCE
        assert op.implementations[0].platforms == registry.PLATFORMS


def test_accelerators_get_no_cpu_kernel():
    for platform in ("gpu", "tpu"):
        with on_platform(platform):
            x, w = jnp.zeros((1, 8), jnp.bfloat16), jnp.zeros((4, 8), jnp.bfloat16)
            assert registry.implementation_for("linear", x, w, None).name == registry.REFERENCE
