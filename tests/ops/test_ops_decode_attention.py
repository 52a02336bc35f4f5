"""Decode attention: every implementation against a float64 loop, over shapes, dtypes, features and cache layouts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_oracle import assert_close, decode_case, exact_decode

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import decode_attention, use
from model_adapters.ops.cpu import ffi
from model_adapters.ops.decode_attention import write_token

IMPLEMENTATIONS = ("reference", "cpu-ffi")
FEATURES = (
    {},
    {"window": 5},
    {"softcap": 3.0, "starts": True},
    {"sinks": True, "starts": True},
    {"window": 21, "softcap": 10.0, "sinks": True, "starts": True, "page": 64, "num_pages": 2},
    {"contiguous": True, "page": 200, "starts": True},
)
GRID = list(itertools.product((16, 24, 64, 80, 128, 256), (1, 2, 3, 8, 16)))


@functools.cache
def compiled(implementation):
    return jax.jit(lambda *args: decode_attention(*args))


def run(implementation, case):
    with use("decode_attention", implementation):  # asked at the first call, when it is traced
        return compiled(implementation)(*case.args)


def check(implementation, case):
    out, pool = run(implementation, case)
    expected, expected_pool = exact_decode(case)
    assert out.dtype == case.q.dtype
    assert pool.dtype == case.pool.dtype
    assert_close(out, expected)
    np.testing.assert_array_equal(np.asarray(pool, np.float64), expected_pool)


def test_the_kernels_are_built_here():
    assert ffi.missing() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("dim", "group"), GRID)
def test_kernel_over_dims_and_groups(dim, group, dtype):
    features = FEATURES[GRID.index((dim, group)) % len(FEATURES)]
    check("cpu-ffi", decode_case(dim=dim, group=group, dtype=dtype, seed=dim + group, **features))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", FEATURES, ids=lambda f: ",".join(f) or "plain")
def test_features(implementation, features):
    check(implementation, decode_case(dim=32, group=3, **features))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dim", "value_dim"), [(24, 16), (40, 72), (17, 3), (64, 128)])
def test_value_dim_differs(implementation, dim, value_dim):
    check(implementation, decode_case(dim=dim, value_dim=value_dim, dtype="bfloat16", starts=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dim", "value_dim", "value_begin"), [(24, 16, 0), (40, 17, 9), (144, 144, 0)])
def test_values_may_be_columns_of_keys(implementation, dim, value_dim, value_begin):
    check(implementation, decode_case(dim=dim, value_dim=value_dim, value_begin=value_begin, group=4, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("implementation", "dtype", "pool_dtype"),
    [
        ("cpu-ffi", "float16", "float16"),
        ("cpu-ffi", "float32", "bfloat16"),
        ("cpu-ffi", "bfloat16", "float32"),
        ("reference", "float32", "bfloat16"),
        ("reference", "bfloat16", "float32"),
    ],
)
def test_pool_dtype_may_differ(implementation, dtype, pool_dtype):
    check(implementation, decode_case(dtype=dtype, pool_dtype=pool_dtype, group=4))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_pools(implementation, dtype):
    """Quantized by numpy here: what is read is steps times scale, and the new token is stored in steps."""
    case = decode_case(dtype=dtype, dim=80, group=4, sinks=True)
    rng = np.random.default_rng(1)
    steps = rng.integers(-127, 128, case.pool.shape)
    k_scale, v_scale = (rng.uniform(0.01, 0.03, 2).astype(np.float32) for _ in "kv")
    parts = ((case.k, k_scale), (case.v, v_scale))
    new = [np.clip(np.rint(np.asarray(x, np.float32) / by[:, None]), -127, 127) for x, by in parts]
    exact = decode_case(dtype=dtype, dim=80, group=4, sinks=True)
    by = np.repeat(np.stack([k_scale, v_scale], 1), 80, axis=1)  # [H, D + Dv]
    exact.pool = steps * by.astype(np.float64)[:, None]
    exact.k, exact.v = (x * scale.astype(np.float64)[:, None] for x, (_, scale) in zip(new, parts, strict=True))
    case.pool = jnp.asarray(steps, jnp.int8)
    with use("decode_attention", implementation):
        case.options |= {"k_scale": jnp.asarray(k_scale), "v_scale": jnp.asarray(v_scale)}
        out, pool = decode_attention(*case.args)
    expected, expected_pool = exact_decode(exact)
    assert_close(out, expected)
    assert pool.dtype == jnp.int8
    np.testing.assert_array_equal(np.asarray(pool), np.rint(expected_pool / by[:, None]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_alibi(implementation):
    case = decode_case(batch=4, group=3, starts=True, window=20)
    slopes = np.float32(2.0) ** -np.arange(1, 7, dtype=np.float32)
    case.options["alibi_slopes"] = jnp.asarray(slopes)
    with use("decode_attention", implementation):
        out, _ = decode_attention(*case.args)
    # The bias as one more dimension: the position of a key times the slope of a query head.
    positions = np.zeros((*np.asarray(case.pool).shape[:3], 1))
    for b, row in enumerate(np.asarray(case.page_table)):
        for p in range(case.pool.shape[2] * len(row)):
            positions[row[p // 16], :, p % 16] = p - int(case.lens[b]) + 1
    exact = decode_case(batch=4, group=3, starts=True, window=20)
    extra = np.broadcast_to(slopes[:, None] / case.options["scale"], (4, 6, 1))
    exact.q = np.concatenate([np.asarray(case.q, np.float64), extra], -1)
    exact.k = np.concatenate([np.asarray(case.k, np.float64), np.zeros((4, 2, 1))], -1)
    keys, values = np.split(np.asarray(case.pool, np.float64), 2, axis=-1)
    exact.pool = np.concatenate([keys, positions, values], -1)
    assert_close(out, exact_decode(exact)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_pool_with_longer_rows(implementation):
    case = decode_case(dim=24)
    expected = run(implementation, case)[0]
    case.pool = jnp.pad(case.pool, ((0, 0), (0, 0), (0, 0), (0, 80)), constant_values=jnp.nan)
    np.testing.assert_array_equal(run(implementation, case)[0], expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_page_edges(implementation):
    check(implementation, decode_case(batch=7, lens=[1, 2, 15, 16, 17, 32, 48], page=16, num_pages=3))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_long_context_of_one_head_is_split(implementation):
    check(implementation, decode_case(batch=1, heads=1, group=2, lens=[3001], page=64, num_pages=47, sinks=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_see_nothing_give_zeros_whatever_the_unused_pages_hold(implementation):
    case = decode_case(batch=4, lens=[0, 6, -3, 6], sinks=True)
    case.starts = jnp.array([0, 6, 0, 5], jnp.int32)
    case.pool = jnp.full_like(case.pool, jnp.nan)
    out, pool = run(implementation, case)
    np.testing.assert_array_equal(out[:3], 0)
    # Row 3 sees the new token alone, whose share the sink cuts.
    assert np.isfinite(out[3]).all() and (out[3] != 0).all()
    written = np.isfinite(np.asarray(pool)).any(axis=(1, 3))
    assert written.sum() == 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_length_beyond_the_pages_writes_nothing_and_sees_what_is_there(implementation):
    case = decode_case(batch=2, lens=[32, 32], num_pages=2)
    full = run(implementation, case)[0]
    case.pool = run(implementation, case)[1]
    case.lens = jnp.array([33, 2**31 - 1], jnp.int32)
    out, pool = run(implementation, case)
    np.testing.assert_allclose(out, full, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(pool, case.pool)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_outside_the_pool_are_not_written(implementation):
    case = decode_case(batch=2, lens=[3, 4], num_pages=1)
    case.page_table = jnp.array([[-1], [1000]], jnp.int32)
    out, pool = run(implementation, case)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(pool, case.pool)


CASE = decode_case(batch=4, page=8, num_pages=5, group=3, dim=16, sinks=True)


@settings(max_examples=60)
@given(st.data())
def test_kernel_and_reference_agree_on_ragged_rows(data):
    rows = [data.draw(st.integers(0, 40)) for _ in range(4)]
    CASE.lens = jnp.array(rows, jnp.int32)
    CASE.starts = jnp.array([data.draw(st.integers(0, 41)) for _ in rows], jnp.int32)
    CASE.page_table = jnp.array(data.draw(st.permutations(range(22))), jnp.int32)[:20].reshape(4, 5)
    CASE.options["window"] = data.draw(st.sampled_from([None, 1, 9]))
    (out, pool), (expected, expected_pool) = (run(name, CASE) for name in reversed(IMPLEMENTATIONS))
    in_use = max((index + 1 for index, length in enumerate(rows) if length), default=0)
    np.testing.assert_allclose(out[:in_use], expected[:in_use], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(pool, expected_pool)
    padding = np.asarray(out[in_use:])
    assert (padding == (np.asarray(out[in_use - 1]) if in_use else 0)).all()


def test_matches_torch_attention_on_a_contiguous_cache():
    case = decode_case(batch=2, heads=2, group=4, dim=32, contiguous=True, page=50, lens=[50, 50])
    out, pool = run("cpu-ffi", case)
    cache = torch.from_numpy(np.array(pool))
    q = torch.from_numpy(np.array(case.q))[:, :, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, cache[..., :32], cache[..., 32:], scale=case.options["scale"], enable_gqa=True
    )[:, :, 0]
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_donated_pool_stays_where_it_is(dtype):
    case = decode_case(dtype=dtype, page=64, num_pages=16)
    pool = jnp.array(case.pool, copy=True)  # one made from numpy shares its memory, which JAX cannot give away

    def step(pool):
        return decode_attention(*case.args[:3], pool, *case.args[4:])

    program = jax.jit(step, donate_argnums=0).lower(pool).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes // 100
    where = pool.unsafe_buffer_pointer()
    assert program(pool)[1].unsafe_buffer_pointer() == where


def test_the_write_of_the_reference_is_in_place():
    case = decode_case(page=64, num_pages=16)
    pool = jnp.array(case.pool, copy=True)
    write = jax.jit(lambda pool: write_token(case.k, case.v, pool, case.page_table, case.lens), donate_argnums=0)
    program = write.lower(pool).compile()
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes // 100
    where = pool.unsafe_buffer_pointer()
    assert program(pool).unsafe_buffer_pointer() == where


def test_a_pool_that_is_not_donated_keeps_its_values():
    case = decode_case()
    before = np.array(case.pool)
    run("cpu-ffi", case)
    np.testing.assert_array_equal(case.pool, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((3, 5, 64))}, "query heads a multiple of kv heads, got 5 and 2"),
        ({"q": jnp.zeros((3, 4, 1, 64))}, "q of rank 3, got 4"),
        ({"k": jnp.zeros((3, 2, 32))}, r"k of shape \(3, 2, 64\), got \(3, 2, 32\)"),
        ({"pool": jnp.zeros((9, 2, 16, 64))}, r"\(2, 16, 128\), got \(2, 16, 64\)"),
        ({"lens": jnp.zeros((2,), jnp.int32)}, r"lens of shape \(3,\), got \(2,\)"),
        ({"starts": jnp.zeros((3, 1), jnp.int32)}, r"starts of shape \(3,\)"),
        ({"page_table": jnp.zeros((2, 4), jnp.int32)}, "page_table rows 3, got 2"),
        ({"sinks": jnp.zeros((2,))}, r"sinks of shape \(4,\), got \(2,\)"),
        ({"options": {"scale": 1.0, "window": 0}}, "a window of at least 1 or None, got 0"),
        ({"options": {"scale": 1.0, "softcap": -1.0}}, "a positive softcap or None, got -1.0"),
        (
            {"options": {"scale": 1.0, "softcap": 1.0, "alibi_slopes": jnp.zeros(4)}},
            "softcap or alibi_slopes, got both",
        ),
        ({"options": {"scale": 1.0, "alibi_slopes": jnp.zeros(2)}}, r"alibi_slopes of shape \(4,\), got \(2,\)"),
        (
            {"options": {"scale": 1.0, "k_scale": jnp.zeros(2), "v_scale": jnp.zeros(2)}},
            "kv_scales with a pool of int8 or float8_e4m3fn and",
        ),
        (
            {"options": {"scale": 1.0, "prefix_lens": jnp.zeros(2, jnp.int32)}},
            r"prefix_lens of shape \(3,\), got \(2,\)",
        ),
        ({"pool": jnp.zeros((14, 2, 16, 128), jnp.int8)}, "got a pool of int8 without kv_scales"),
        ({"lens": jnp.zeros((3,))}, "lens of an integer dtype, got float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    case = decode_case()
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(InvalidArgumentError, match=message):
        decode_attention(*case.args)


def test_a_dtype_the_kernel_lacks_goes_to_the_reference_and_is_refused_when_it_is_asked_for():
    case = decode_case(pool_dtype="float8_e5m2")
    out, _ = decode_attention(*case.args)
    np.testing.assert_allclose(out, exact_decode(case)[0], rtol=2e-5, atol=2e-5)
    with pytest.raises(
        InvalidArgumentError,
        match="pool is float8_e5m2; the kernel has bfloat16, float16, float32, int8, float8_e4m3fn",
    ):
        run("cpu-ffi", case)
