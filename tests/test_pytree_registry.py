"""The rules of pytree_registry: what is a leaf, who owns a class, what a count may be asked."""

import dataclasses
import math
import operator
import subprocess
import sys
from collections import OrderedDict, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, cache_utils
from transformers.utils import ModelOutput

import pytree_registry
from pytree_registry import RegistrationError, TracedCount, TracedCountError
from pytree_registry.traced_counts import CountRule

pytree_registry.register_all()


class Holder:
    """Any object with attributes; rebuilt without this constructor."""

    def __init__(self, **attributes):
        assert attributes, "rebuilt through the constructor"
        vars(self).update(attributes)


pytree_registry.register(Holder)
Pair = namedtuple("Pair", "left right")


def test_public_names():
    assert pytree_registry.__all__ == [
        "RegistrationError", "TracedCount", "TracedCountError", "exact_counts", "is_registered", "owner_of", "register",
        "register_all", "registered_classes",
    ]  # fmt: skip


def test_import_is_cheap_and_registration_imports_no_modeling_file():
    code = (
        "import sys, pytree_registry\n"
        "assert not any(name.startswith(('transformers', 'torchax')) for name in sys.modules)\n"
        "pytree_registry.register_all()\n"
        "loaded = [name for name in sys.modules if '.modeling_' in name and name.startswith('transformers.models')]\n"
        "assert loaded == [], loaded\n"
        "before = len(pytree_registry.registered_classes())\n"
        "from transformers.models.xlstm.modeling_xlstm import xLSTMCache, xLSTMCausalLMOutput\n"
        "assert pytree_registry.is_registered(xLSTMCausalLMOutput)\n"
        "assert not pytree_registry.is_registered(xLSTMCache)\n"
        "pytree_registry.register_all()\n"
        "assert pytree_registry.is_registered(xLSTMCache)\n"
        "known = pytree_registry.registered_classes()\n"
        "pytree_registry.register_all()\n"
        "assert pytree_registry.registered_classes() == known and len(known) > before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_leaves_and_static_part_of_a_mixed_object():
    config = LlamaConfig()
    holder = Holder(
        keys=torch.ones(2),
        states={1: torch.zeros(3), 0: None},
        layers=[(torch.ones(1), "name"), OrderedDict(a=jnp.ones(4), b=7)],
        pair=Pair(np.ones(5), torch.float32),
        device=torch.device("cpu"),
        shape=torch.Size([2, 3]),
        is_initialized=True,
        window=4,
        kinds={"full"},
        config=config,
        function=len,
    )
    leaves, structure = jax.tree.flatten(holder)
    assert [leaf.shape[0] for leaf in leaves] == [2, 3, 1, 4, 5]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(holder)[0]]
    assert paths == [".keys", ".states[1]", ".layers[0][0]", ".layers[1]['a']", ".pair[0]"]
    back = jax.tree.unflatten(structure, leaves)
    assert list(vars(back)) == list(vars(holder))
    assert back.keys is holder.keys
    assert list(back.states) == [1, 0]
    assert back.states is not holder.states
    assert (type(back.pair), back.pair.right, back.layers[0][1], back.layers[1]["b"]) == (
        Pair,
        torch.float32,
        "name",
        7,
    )
    assert (back.device, back.shape, back.is_initialized, back.kinds) == (holder.device, (2, 3), True, {"full"})
    assert type(back.shape) is torch.Size
    assert back.config is config
    assert back.function is len


def test_static_values_of_different_types_are_different_structures():
    flags = [jax.tree.structure(Holder(flag=flag)) for flag in (True, 1, 1.0)]
    assert flags[0] != flags[1] != flags[2] != flags[0]


def test_equal_configurations_give_equal_structures():
    one, same, other = (jax.tree.structure(Holder(config=LlamaConfig(num_hidden_layers=n))) for n in (2, 2, 3))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


class Opaque:
    """Holds a tensor where no rule looks."""

    def __init__(self):
        self.inside = torch.ones(1)


class Unhashable:
    """Defines equality without a hash."""

    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize(
    ("attributes", "where", "what"),
    [
        ({"bad": Unhashable()}, "Holder.bad", "unhashable Unhashable"),
        ({"good": 1, "worse": [1, {"x": Unhashable()}]}, r"Holder.worse\[1\]\['x'\]", "unhashable Unhashable"),
        ({"bad": Opaque()}, "Holder.bad", "Opaque that holds tensors"),
        ({"bad": {torch.ones(1)}}, "Holder.bad", "set that holds tensors"),
        ({"bad": bytearray(b"x")}, "Holder.bad", "unhashable bytearray"),
    ],
)
def test_what_cannot_be_split_is_refused_by_class_and_attribute(attributes, where, what):
    with pytest.raises(RegistrationError, match=f"^{where}: expected .*{what}.*register"):
        jax.tree.flatten(Holder(**attributes))


def test_an_object_rebuilt_around_foreign_leaves_comes_apart_at_the_same_places():
    cache = cache_utils.DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    cache = jax.tree.map(lambda leaf: jnp.asarray(leaf.numpy()), cache)
    structure = jax.tree.structure(cache)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for foreign in (sharding, 0, "text", object(), jax.ShapeDtypeStruct((1,), jnp.float32)):
        filled = jax.tree.map(lambda leaf, foreign=foreign: foreign, cache)
        assert jax.tree.structure(filled) == structure
        assert jax.tree.leaves(filled) == [foreign, foreign]
    shardings = jax.tree.map(lambda leaf: sharding, cache)
    identity = jax.jit(lambda tree: tree, in_shardings=(shardings,), out_shardings=shardings)
    assert jax.tree.structure(identity(cache)) == structure
    batched = jax.vmap(lambda tree: tree, in_axes=(jax.tree.map(lambda leaf: 1, cache),), out_axes=1)(cache)
    np.testing.assert_array_equal(batched.layers[0].keys, cache.layers[0].keys)
    assert jax.tree.structure(jax.eval_shape(lambda tree: tree, cache)) == structure


def test_an_output_keeps_entries_extra_keys_and_a_stale_entry():
    @dataclasses.dataclass
    class Output(ModelOutput):
        logits: torch.Tensor | None = None
        hidden: tuple | None = None

    assert pytree_registry.is_registered(Output)  # when its class statement ended, outside transformers too
    output = Output(logits=torch.ones(2), hidden=(torch.zeros(1), torch.zeros(3)))
    output["extra"] = torch.ones(4)
    leaves, structure = jax.tree.flatten(output)
    back = jax.tree.unflatten(structure, leaves)
    assert list(back) == ["logits", "hidden", "extra"]
    assert back[0] is back.logits is back["logits"] is output.logits
    assert back.extra.shape == (4,)
    output.logits = None
    back = jax.tree.map(lambda leaf: leaf, output)
    assert back.logits is None
    assert back["logits"] is output["logits"]
    empty = jax.tree.map(lambda leaf: leaf, Output(logits=torch.ones(1)))
    assert list(empty) == ["logits"]
    assert empty.hidden is None


def test_second_owner_is_refused():
    class Taken:
        pass

    jax.tree_util.register_pytree_node(Taken, lambda _: ((), None), lambda *_: Taken())
    assert pytree_registry.owner_of(Taken) == "unknown"
    with pytest.raises(RegistrationError, match=r"Taken, which somebody else has registered"):
        pytree_registry.register(Taken)
    assert not pytree_registry.is_registered(Taken)
    with pytest.raises(RegistrationError, match="StaticLayer"):
        jax.tree_util.register_pytree_node(cache_utils.StaticLayer, lambda _: ((), None), lambda *_: None)


def test_a_class_may_name_another_owner():
    class OwnCache(cache_utils.Cache):
        pytree_owner = "elsewhere"

    class Derived(OwnCache):
        pass

    assert not pytree_registry.is_registered(OwnCache)
    assert not pytree_registry.is_registered(Derived)
    assert pytree_registry.owner_of(OwnCache) == "elsewhere"
    with pytest.raises(RegistrationError, match=r"OwnCache, which declares pytree_owner = 'elsewhere'"):
        pytree_registry.register(OwnCache)
    jax.tree_util.register_pytree_node(OwnCache, lambda _: ((), None), lambda *_: None)


def test_owners():
    assert pytree_registry.owner_of(cache_utils.DynamicCache) == "pytree_registry"
    assert pytree_registry.owner_of(cache_utils.CacheLayerMixin) == "pytree_registry"
    assert pytree_registry.owner_of(dict) == "unknown"
    assert pytree_registry.owner_of(LlamaConfig) is None
    assert pytree_registry.owner_of(Opaque) is None
    pytree_registry.register(Holder)  # again, by its owner
    assert pytree_registry.registered_classes().count(Holder) == 1


def test_init_subclass_of_transformers_still_runs():
    class CustomLayer(cache_utils.DynamicLayer):
        _layer_type = "layer_of_a_test"

    try:
        assert cache_utils.DYNAMIC_LAYER_TYPE_MAPPING["layer_of_a_test"] is CustomLayer
        assert pytree_registry.is_registered(CustomLayer)
    finally:
        del cache_utils.DYNAMIC_LAYER_TYPE_MAPPING["layer_of_a_test"]


ARRAYS = st.integers(0, 3).map(lambda n: jnp.arange(n))
STATIC = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.sampled_from([torch.bfloat16, torch.device("cpu")])
)
TREES = st.recursive(
    ARRAYS | STATIC,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=3)
        | st.builds(lambda value: Holder(value=value), inner)
    ),
    max_leaves=8,
)


def plain(value):
    """`value` with arrays as lists and holders as dicts, types kept."""
    if isinstance(value, Holder):
        return "holder", plain(vars(value))
    if isinstance(value, dict):
        return "dict", [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [plain(item) for item in value]
    return ("array", value.tolist()) if isinstance(value, jax.Array) else (type(value), value)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), TREES, min_size=1))
def test_any_attributes_make_the_round_trip(attributes):
    holder = Holder(**attributes)
    leaves, structure = jax.tree.flatten(holder)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    back = jax.tree.unflatten(structure, leaves)
    assert plain(back) == plain(holder)
    assert jax.tree.structure(back) == structure
    assert hash(jax.tree.structure(back)) == hash(structure)
    foreign = jax.tree.unflatten(structure, [object() for _ in leaves])
    assert jax.tree.structure(foreign) == structure


QUESTIONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
ENDS = st.integers(-4, 4)


@settings(max_examples=200)
@given(ENDS, st.integers(0, 6) | st.just(math.inf), ENDS, st.sampled_from(QUESTIONS))
def test_a_traced_count_answers_for_every_value_or_not_at_all(low, extent, other, question):
    values = range(low, low + (20 if extent == math.inf else extent) + 1)
    answers = {question(value, other) for value in values}
    mirrored = {question(other, value) for value in values}

    def ask(value):
        count = TracedCount(value, low, low + extent)
        for asked, expected in ((lambda: question(count, other), answers), (lambda: question(other, count), mirrored)):
            if len(expected) == 1:
                assert asked() is expected.pop()
            else:
                with pytest.raises(TracedCountError, match="exact_counts"):
                    asked()
        return value

    jax.eval_shape(ask, jax.ShapeDtypeStruct((), jnp.int32))
    for value in values:  # where the value is known, every question has its answer
        assert question(TracedCount(jnp.int32(value), low, low + extent), other) == question(value, other)


@settings(max_examples=100)
@given(st.integers(0, 9), ENDS, ENDS)
def test_arithmetic_of_counts(value, one, other):
    count = TracedCount(jnp.int32(value), 0, 9)
    for made, expected in (
        (count + one, value + one),
        (one + count, value + one),
        (count - one, value - one),
        (one - count, one - value),
        (-count + other, other - value),
        (count + one - (other + count), one - other),
        (max(count - one, 0), max(value - one, 0)),
    ):
        assert int(made) == expected
        assert not isinstance(made, TracedCount) or made.low <= expected <= made.high
    np.testing.assert_array_equal(torch.arange(3) + TracedCount(torch.tensor(value), 0, 9), np.arange(3) + value)
    assert bool(count) == bool(value)
    assert int(count.zero_()) == 0


def test_a_traced_count_is_no_number():
    with pytest.raises(TracedCountError, match=r"known value, got one traced in 1\.\.5"):
        jax.eval_shape(lambda value: list(range(TracedCount(value, 1, 5))), jax.ShapeDtypeStruct((), jnp.int32))


@settings(max_examples=100)
@given(st.integers(1, 6), st.integers(0, 12), st.booleans())
def test_ranges_hold_the_count_and_do_not_move(window, count, exact):
    rule = CountRule("count", "window", exact_below_window=exact)
    settled = rule.canonicalize(count, window)
    assert settled.low <= count <= settled.high
    assert int(settled) == count
    again = rule.canonicalize(TracedCount(jnp.int32(count), settled.low, settled.high), window)
    assert (again.low, again.high, again.settled) == (settled.low, settled.high, True)
    if count >= window:
        after = rule.canonicalize(settled + 1, window)
        assert (after.low, after.high) == (window, math.inf)
    with pytree_registry.exact_counts():
        assert rule.canonicalize(settled, window).high == count


def test_a_structure_that_is_not_of_its_count_is_refused():
    structure = jax.tree.structure(TracedCount(jnp.int32(2), 1, 4, settled=True))
    with pytest.raises(RegistrationError, match=r"expected a token count in 1\.\.4, got 7"):
        jax.tree.unflatten(structure, [jnp.int32(7)])
