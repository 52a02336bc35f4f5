"""`write_pages`: the pool that numpy makes, in the C++ kernel and in XLA's operations, in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_adapters.ops.cpu import ffi
from model_adapters.ops.kv_pool import write_pages

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.float8_e4m3fn]


def arrays(dtype, num_pages):
    rng = np.random.default_rng(0)
    pool, values = (rng.integers(-100, 100, (n, 2, 4, 6)).astype(dtype) for n in (9, num_pages))
    return pool, values


@pytest.mark.parametrize("is_on_mesh", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_those_of_numpy(dtype, is_on_mesh):
    assert ffi.missing() is None
    pool, values = arrays(dtype, 3)
    expected = pool.copy()
    expected[[4, 8, 1]] = values
    write = jax.jit(functools.partial(write_pages, is_on_mesh=is_on_mesh), donate_argnums=0)
    donated = jnp.asarray(pool)
    found = write(donated, np.array([4, 8, 1], np.int32), values)
    assert donated.is_deleted()
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("is_on_mesh", [False, True])
def test_a_page_may_occur_twice_with_the_same_values(is_on_mesh):
    pool, values = arrays(jnp.bfloat16, 1)
    found = write_pages(jnp.asarray(pool), jnp.array([3, 3]), jnp.asarray(values.repeat(2, 0)), is_on_mesh=is_on_mesh)
    pool[3] = values[0]
    np.testing.assert_array_equal(np.asarray(found), pool)


def test_nothing_outside_of_the_pool_is_written():
    pool, values = arrays(jnp.float32, 2)
    found = write_pages(jnp.asarray(pool), jnp.array([-1, 9]), jnp.asarray(values), is_on_mesh=False)
    np.testing.assert_array_equal(np.asarray(found), pool)
