"""Rows that are taken at the end of a program: the same results, and no other rows computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from model_adapters.caches.packed_batch import PackedBatch
from model_adapters.jaxpr.interpreter import inlined
from model_adapters.jaxpr.row_pruning import prune_rows
from model_adapters.program.packed_forward import forward_packed
from torchax_serve import to_jax
from torchax_serve.executors.packed.probes import page_shapes
from torchax_serve.kv_cache.pools import CacheAllocation, CacheGroup, PagedCache

TOKENS, WIDTH, LAST = 7, 8, jnp.array([5, 0, 6])


def whole(*shape, seed=0):
    """Integers, whose sums are exact in any order, and wrap."""
    return jnp.asarray(np.random.default_rng(seed).integers(-9, 9, shape), jnp.int32)


def take(x, mode="clip"):
    return x.at[LAST].get(mode=mode)


def products(function, *args):
    """The shapes of all matrix products in the trace of `function`."""
    program = inlined(jax.make_jaxpr(function)(*args))
    return [each.outputs[0].aval.shape for each in program.equations if each.name == "dot_general"]


STEPS = {
    "product": lambda x: x @ whole(WIDTH, WIDTH, seed=1),
    "product from the left": lambda x: jnp.swapaxes(whole(WIDTH, WIDTH, seed=2) @ x.T, 0, 1),
    "bias": lambda x: x + whole(WIDTH, seed=3),
    "norm": lambda x: x * (x * x).sum(1, keepdims=True),
    "norm in a leading axis": lambda x: jax.lax.mul(x[None], jnp.max(x[None], 2, keepdims=True))[0],
    "condition": lambda x: jnp.where(x > 0, x, -2 * x),
    "called": lambda x: jax.jit(lambda y: jnp.clip(y, -5, 5) * 3)(x),
    "turned": lambda x: jnp.concatenate([-x[:, WIDTH // 2 :], x[:, : WIDTH // 2]], 1),
    "split": lambda x: jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], 1),
    "heads": lambda x: (x.reshape(TOKENS, 2, WIDTH // 2).transpose(1, 0, 2) * 2).transpose(1, 0, 2).reshape(x.shape),
    "a product for each head": lambda x: jnp.einsum(
        "thd,hde->the", x.reshape(TOKENS, 2, WIDTH // 2), whole(2, WIDTH // 2, WIDTH // 2, seed=4)
    ).reshape(x.shape),
    "other rows": lambda x: jnp.cumsum(x, 0),
    "rows in other places": lambda x: x[::-1],
    "some rows, and their sum": lambda x: x + x[jnp.array([1, 4])].sum(0),
    "rows by what was computed": lambda x: x + jnp.zeros_like(x).at[:2].set(x[jnp.abs(x[:2, 0]) % TOKENS]),
}


@settings(max_examples=60)
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=7),
    also=st.lists(st.sampled_from(["all", "sum", "other rows"]), max_size=2, unique=True),
)
def test_results_are_the_same(steps, also):
    def function(x):
        for name in steps:
            x = x + STEPS[name](x)
        rest = {"all": lambda: x, "sum": lambda: x.sum(), "other rows": lambda: x.at[jnp.array([2])].get(mode="clip")}
        return take(x * 2), {name: rest[name]() for name in also}

    x = whole(TOKENS, WIDTH, seed=5)
    jax.tree.map(np.testing.assert_array_equal, prune_rows(function)(x), function(x))


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_rows_that_are_not_there_are_as_before(mode):
    def function(x):
        return (x * 3 + 1).at[jnp.array([1, TOKENS + 4])].get(mode=mode)

    x = whole(TOKENS, WIDTH)
    np.testing.assert_array_equal(prune_rows(function)(x), function(x))


@pytest.mark.parametrize("name", sorted(STEPS.keys() - {name for name in STEPS if "rows" in name}))
def test_what_treats_rows_by_themselves_computes_those_that_are_read(name):
    def function(x):
        return take(STEPS[name](x) @ whole(WIDTH, 3))

    x = whole(TOKENS, WIDTH)
    counts = [shape.count(TOKENS) for shape in products(function, x)]
    assert all(counts)
    cut = products(prune_rows(function), x)
    assert len(cut) == len(counts)
    assert not any(TOKENS in shape for shape in cut)


def test_rows_stay_whole_where_other_rows_are_made_of_them():
    def function(x):
        x = jnp.cumsum(x @ whole(WIDTH, WIDTH), 0)
        return take(x @ whole(WIDTH, 3))

    assert products(prune_rows(function), whole(TOKENS, WIDTH)) == [(TOKENS, WIDTH), (len(LAST), 3)]


def test_what_is_read_whole_too_is_computed_once():
    def function(x):
        x = x @ whole(WIDTH, WIDTH)
        return take(x @ whole(WIDTH, 3)), x.sum()

    assert products(prune_rows(function), whole(TOKENS, WIDTH)) == [(TOKENS, WIDTH), (len(LAST), 3)]


def test_a_gather_of_more_rows_than_there_are_stays():
    def function(x):
        return (x @ whole(WIDTH, 3)).at[jnp.arange(20) % TOKENS].get(mode="clip")

    assert products(prune_rows(function), whole(TOKENS, WIDTH)) == [(TOKENS, 3)]


def with_called(program):
    """All equations of a program, those of functions that layers share in the place of their calls."""
    for each in program.equations:
        if each.name == "jit":
            yield from with_called(inlined(each.params["jaxpr"]))
        else:
            yield each


def rows_of_products(function, *args, width):
    """How many rows the products have whose last dimension is `width`, in the order of the program."""
    shapes = [
        each.outputs[0].aval.shape
        for each in with_called(inlined(jax.make_jaxpr(function)(*args)))
        if each.name in ("dot_general", "ffi_call")
    ]
    return [shape[-2] for shape in shapes if shape[-1] == width]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "gpt2", "opt"])
def test_the_last_layer_of_a_packed_step_has_no_rows_that_nobody_reads(model_type):
    runtime = to_jax(tiny_model(model_type))._jax_runtime
    num_tokens, num_rows, inner = 48, 4, {"gpt2": 128}.get(model_type, 64)
    shapes = page_shapes(runtime)
    groups = tuple(CacheGroup(str(w), w, 17) for w in dict.fromkeys(shape.window for shape in shapes))
    cache = PagedCache(CacheAllocation(shapes, groups, 16, 64))

    def zeros(*shape):
        return np.zeros(shape, np.int32)

    tables = (zeros(num_rows, 4),) * len(groups)
    batch = PackedBatch(
        zeros(num_tokens), zeros(num_tokens), zeros(num_rows + 1), zeros(num_rows), zeros(num_rows), tables
    )
    layout = dataclasses.replace(cache.layout, is_decode=False)

    def step(weights, pools, batch):
        return forward_packed(runtime.program, weights, pools, batch, layout)

    rows = rows_of_products(step, runtime.weights, cache.pools, batch, width=inner)
    assert set(rows) == {num_tokens, num_rows}
    assert rows == sorted(rows, reverse=True)  # the first layer's, then the last one's
