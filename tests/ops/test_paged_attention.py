"""Paged attention of ragged queries: every implementation against a float64 loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_oracle import assert_close
from paged_oracle import exact_paged, paged_case
from thorough import thorough

from model_adapters.bridge.extract import functional_call
from model_adapters.errors import InvalidArgumentError
from model_adapters.lowerings import custom_ops
from model_adapters.ops import paged_attention, registry, use
from model_adapters.ops.kv_pool import token_positions

IMPLEMENTATIONS = ("reference", "cpu-ffi")
IMAGES = ((1, 4), (8, 15), (15, 23))  # of the tokens of a case: in the first sequence, and two in the third
FEATURES = (
    {},
    {"window": 9},
    {"softcap": 3.0, "padding": 4},
    {"sinks": True},
    {"alibi": True},
    {"prefix_lens": (5, 0, 40, 3)},
    {"window": 7, "prefix_lens": (3, 2, 30, 10), "sinks": True},
    {"window": 21, "softcap": 10.0, "sinks": True, "free_behind_window": True},
    {"alibi": True, "window": 30, "sinks": True, "padding": 1, "spare": 24},
    {"images": IMAGES},
    {"images": IMAGES, "window": 9, "sinks": True, "padding": 2},
    {"images": IMAGES, "softcap": 3.0, "prefix_lens": (5, 0, 26, 3), "padding": 2},
)
DTYPES = (
    ("float32", None),
    ("bfloat16", None),
    ("float32", "bfloat16"),
    ("bfloat16", "int8"),
    ("float32", "int8"),
    ("float32", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
)
DIMS, GROUPS, PAGES = (64, 80, 96, 128, 256), (1, 2, 3, 4, 8, 16), (16, 32, 64)
GRID = list(itertools.product(DIMS, GROUPS, PAGES))
GRID_IN_PART = [  # a page for each head size and group, which begin from another one
    (dim, group, page) if (i + j + k) % len(PAGES) == 0 else thorough(dim, group, page)
    for i, dim in enumerate(DIMS)
    for j, group in enumerate(GROUPS)
    for k, page in enumerate(PAGES)
]


@functools.cache
def compiled(implementation):
    return jax.jit(lambda *args: paged_attention(*args))


def run(implementation, case):
    with use("paged_attention", implementation):  # asked at the first call, when it is traced
        return compiled(implementation)(*case.args)


def check(implementation, case):
    out, pool = run(implementation, case)
    expected, expected_pool = exact_paged(case)
    assert out.dtype == case.q.dtype
    num_tokens = int(case.cu_q_lens[-1])
    assert_close(out[:num_tokens], expected[:num_tokens])
    padding, last = (np.asarray(x, np.float64) for x in (out[num_tokens:], out[num_tokens - 1]))
    assert (padding == 0).all() or (padding == last).all()
    assert pool.dtype == case.pool.dtype
    np.testing.assert_array_equal(np.asarray(pool, np.float64), np.asarray(expected_pool, np.float64))


@pytest.mark.parametrize(("dim", "group", "page"), GRID_IN_PART)
def test_kernel_over_dims_groups_and_pages(dim, group, page):
    index = GRID.index((dim, group, page))
    dtype, pool_dtype = DTYPES[index % len(DTYPES)]
    features = FEATURES[index % len(FEATURES)]
    heads = 1 if group > 4 else 2
    check(
        "cpu-ffi",
        paged_case(
            dim=dim, group=group, heads=heads, page=page, dtype=dtype, pool_dtype=pool_dtype, seed=index, **features
        ),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", FEATURES, ids=lambda f: ",".join(f) or "plain")
def test_features(implementation, features):
    check(implementation, paged_case(dim=24, group=3, **features))


@pytest.mark.parametrize(("dtype", "pool_dtype"), [*DTYPES[1:], ("float16", None), ("bfloat16", "float32")])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dtypes(implementation, dtype, pool_dtype):
    check(implementation, paged_case(dtype=dtype, pool_dtype=pool_dtype, dim=80, page=32, sinks=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dim", "value_dim"), [(24, 16), (40, 72), (17, 3), (64, 128)])
def test_value_dim_differs(implementation, dim, value_dim):
    check(implementation, paged_case(dim=dim, value_dim=value_dim, dtype="bfloat16", spare=5))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pool_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("dim", "value_dim", "value_begin"), [(40, 17, 9), (144, 128, 0)])
def test_values_may_be_columns_of_keys(implementation, dim, value_dim, value_begin, pool_dtype):
    sizes = {"dim": dim, "value_dim": value_dim, "value_begin": value_begin, "heads": 1, "group": 16}
    check(implementation, paged_case(**sizes, pool_dtype=pool_dtype, spare=5))


@pytest.mark.parametrize("value_begin", [-1, 9])
def test_values_are_whole_columns_of_keys(value_begin):
    case = paged_case(dim=24, value_dim=16, value_begin=value_begin)
    with pytest.raises(InvalidArgumentError, match=f"value_begin within 0 .. D - Dv = 8, .* got {value_begin}"):
        paged_attention(*case.args)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page", [16, 32, 64])
def test_lengths_at_the_edges_of_pages(implementation, page):
    kv_lens = (1, page - 1, page, page + 1, 2 * page, 2 * page, 1, 3 * page)
    check(implementation, paged_case(q_lens=(1, page - 1, page, 1, page, 1, 1, 2), kv_lens=kv_lens, page=page, dim=16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_long_chunk_among_rows_that_decode(implementation):
    q_lens, kv_lens = (1, 1, 150, 1, 1), (70, 1, 600, 129, 64)
    check(implementation, paged_case(q_lens=q_lens, kv_lens=kv_lens, heads=1, group=4, dim=16, page=32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_window_and_a_prefix_far_apart(implementation):
    """The pages between them have been given back: NaN lies where the table points."""
    case = paged_case(q_lens=(3,), kv_lens=(300,), window=40, prefix_lens=(10,), dim=16)
    table = np.array(case.page_table)
    table[0, 1 : (300 - 3 - 40) // 16] = 0
    case.page_table = jnp.asarray(table)
    check(implementation, case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_unused_rows_give_zeros_and_write_nothing_nor_does_padding(implementation):
    case = paged_case(q_lens=(0, 3, 0, 2, 4, 0), kv_lens=(0, 3, 20, 0, 30, 0), padding=6, sinks=True)
    check(implementation, case)
    out, pool = run(implementation, case)
    np.testing.assert_array_equal(out[3:5], 0)  # the row of length 0 that has tokens
    assert (np.asarray(pool) != np.asarray(case.pool)).any(axis=(1, 3)).sum() > 7  # NaN differs from itself too


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_without_a_place_write_nothing(implementation):
    """Before position 0, behind the row's pages, and on pages outside the pool."""
    case = paged_case(q_lens=(6, 4, 3), kv_lens=(4, 32, 3), page=16)
    pool = jnp.nan_to_num(case.pool)
    table = np.array(case.page_table)[:, :1]
    table[1, 0], table[2, 0] = 2, 1000
    case = case.with_(pool=pool, page_table=jnp.asarray(table))
    out, after = run(implementation, case)
    expected, expected_pool = exact_paged(case)
    np.testing.assert_array_equal(out[:2], 0)
    assert_close(out[:10], expected[:10])
    np.testing.assert_array_equal(after, expected_pool)
    np.testing.assert_array_equal(after[2], pool[2])


def test_positions_of_tokens_are_those_of_a_loop():
    kv_lens, q_lens, num_padding = [7, 0, 1, 5, 2], [3, 0, 1, 5, 3], 4  # the last one's first token has no position
    expected = []
    for seq, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
        expected += [(seq, position) for position in range(kv_len - q_len, kv_len)]
    cu_q_lens = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)
    seqs, positions = token_positions(len(expected) + num_padding, jnp.asarray(kv_lens, jnp.int32), cu_q_lens)
    assert list(zip(seqs.tolist(), positions.tolist(), strict=True))[: len(expected)] == expected
    assert positions.tolist()[len(expected) :] == [-1] * num_padding
    assert (seqs.dtype, positions.dtype) == (jnp.int32, jnp.int32)


def test_int8_pools_hold_what_numpy_quantizes():
    case = paged_case(dtype="float32", pool_dtype="int8", dim=48, heads=3, group=1)
    case.options["k_scale"] = jnp.array([2**-6, 2**-5, 2**-7], jnp.float32)  # so that ties are ties
    scale = np.asarray(case.options["k_scale"])
    # Ties, both ends of the range and beyond.
    steps = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0, 127.5, 400.0, -127.0, -128.0, -1e30], np.float32)
    case.k = case.k.at[0, :, : len(steps)].set(steps * scale[:, None])
    expected = exact_paged(case)[1]
    for implementation in IMPLEMENTATIONS:
        pool = np.asarray(run(implementation, case)[1])
        assert pool.dtype == np.int8
        np.testing.assert_array_equal(pool, expected)
    assert expected.min() == -127
    assert expected.max() == 127


def test_float8_pools_hold_what_numpy_rounds():
    """Every number between two neighbours, the ends of the range, subnormals, and what is not a number."""
    case = paged_case(dtype="float32", pool_dtype="float8_e4m3fn", dim=256, heads=1, group=1, page=64)
    case.options["k_scale"] = jnp.array([2**-6], jnp.float32)
    codes = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)  # 0 to 448
    ties = (codes[:-1] + codes[1:]) / 2
    edges = np.array([0.0009, 0.0011, 1e-30, 449.0, 1e30, np.inf], np.float32)
    for token, numbers in enumerate((codes, ties, np.nextafter(ties, 0), np.nextafter(ties, 500), edges)):
        for sign, begin in ((1, 0), (-1, 128)):
            place = slice(begin, begin + len(numbers))
            case.k = case.k.at[token, 0, place].set(sign * numbers * np.float32(2**-6))
    expected = exact_paged(case)[1]
    case.k = case.k.at[5, 0, :3].set(jnp.nan)
    for implementation in IMPLEMENTATIONS:
        pool = np.asarray(run(implementation, case)[1]).copy()
        assert pool.dtype == jnp.float8_e4m3fn
        stored, place = pool.view(np.uint8), np.asarray(expected).view(np.uint8)
        different = np.argwhere(stored != place)
        assert len(different) == 3  # the three that are not numbers, which become 0
        assert (stored[tuple(different.T)] == 0).all()


CASE = paged_case(q_lens=(4, 4, 4, 4), kv_lens=(30, 30, 30, 30), page=8, group=3, dim=16, sinks=True)
CASE.pool = jnp.nan_to_num(CASE.pool)


@settings(max_examples=60)
@given(st.data())
def test_kernel_and_reference_agree_on_ragged_rows(data):
    cuts = sorted(data.draw(st.integers(0, 16)) for _ in range(4))
    q_lens = np.diff([0, *cuts])
    kv_lens = [data.draw(st.integers(max(0, n - 1), 41)) for n in q_lens]
    case = CASE.with_(
        cu_q_lens=jnp.array([0, *cuts], jnp.int32),
        kv_lens=jnp.array(kv_lens, jnp.int32),
        page_table=jnp.array(data.draw(st.permutations(range(23))), jnp.int32)[:20].reshape(4, 5),
        options={
            "scale": 0.25,
            "window": data.draw(st.sampled_from([None, 1, 9])),
            "prefix_lens": jnp.array([data.draw(st.integers(0, 20)) for _ in q_lens], jnp.int32),
            "sees_until": jnp.array(data.draw(st.lists(st.integers(-1, 45), min_size=16, max_size=16)), jnp.int32),
        },
    )
    (out, pool), (expected, expected_pool) = (run(name, case) for name in reversed(IMPLEMENTATIONS))
    np.testing.assert_allclose(out[: cuts[-1]], expected[: cuts[-1]], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(pool, expected_pool)


def test_padding_repeats_the_result_of_the_last_token():
    """So that the products which follow find equal rows."""
    case = paged_case(padding=5)
    out = run("cpu-ffi", case)[0]
    np.testing.assert_array_equal(out[-5:], np.broadcast_to(out[-6], (5, *out.shape[1:])))


def test_a_prompt_matches_torch_attention():
    case = paged_case(q_lens=(100,), kv_lens=(100,), heads=2, group=4, dim=32)
    q, k, v = (torch.from_numpy(np.array(x)).transpose(0, 1)[None] for x in (case.q, case.k, case.v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=case.options["scale"], enable_gqa=True
    )[0].transpose(0, 1)
    for implementation in IMPLEMENTATIONS:
        np.testing.assert_allclose(run(implementation, case)[0], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_donated_pool_stays_where_it_is(implementation, pool_dtype):
    case = paged_case(pool_dtype=pool_dtype, page=64, heads=8, dim=64)
    pool = jnp.array(case.pool, copy=True)  # one made from numpy shares its memory, which JAX cannot give away

    def step(pool):
        return paged_attention(*case.args[:3], pool, *case.args[4:])

    with use("paged_attention", implementation):
        program = jax.jit(step, donate_argnums=0).lower(pool).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    if implementation == "cpu-ffi":
        assert memory.temp_size_in_bytes < pool.nbytes // 20
    where = pool.unsafe_buffer_pointer()
    assert program(pool)[1].unsafe_buffer_pointer() == where


def test_a_pool_that_is_not_donated_keeps_its_values():
    case = paged_case()
    before = np.array(case.pool)
    run("cpu-ffi", case)
    np.testing.assert_array_equal(case.pool, before)


def test_the_reference_does_not_gather_for_every_token():
    """Its memory is that of one sequence, whatever the number of tokens."""
    q_lens, kv_lens = (250, *[1] * 6), (512,) * 7
    case = paged_case(q_lens=q_lens, kv_lens=kv_lens, page=64, dim=32, heads=2, group=1)
    with use("paged_attention", "reference"):
        program = jax.jit(lambda *args: paged_attention(*args)).lower(*case.args).compile()
    one_sequence = case.page_table.shape[1] * 64 * 2 * 64 * 4
    per_token = len(case.q) * one_sequence
    assert program.memory_analysis().temp_size_in_bytes < case.pool.nbytes + 12 * one_sequence < per_token // 4


SCALES = {"k_scale": jnp.zeros(2), "v_scale": jnp.zeros(2)}
REFUSED = [
    ({"q": jnp.zeros((24, 5, 32))}, "query heads a multiple of kv heads, got 5 and 2"),
    ({"q": jnp.zeros((24, 4, 1, 32))}, "q of rank 3, got 4"),
    ({"k": jnp.zeros((24, 2, 16))}, r"k of shape \(24, 2, 32\), got \(24, 2, 16\)"),
    ({"v": jnp.zeros((23, 2, 32))}, r"v of shape \(24, 2, 32\), got \(23, 2, 32\)"),
    ({"pool": jnp.zeros((9, 2, 16, 63))}, r"D \+ Dv or more\] = \(2, 16, 64\), got \(2, 16, 63\)"),
    ({"pool": jnp.zeros((0, 2, 16, 64))}, "at least one page of at least one position"),
    (
        {"pool": jnp.zeros((9, 2, 16, 64), jnp.int8)},
        "kv_scales with a pool of int8 or float8_e4m3fn and with no other, got a pool of int8 w",
    ),
    ({"pool": jnp.zeros((9, 2, 16, 64), jnp.int32)}, "a pool of a float dtype or int8, got int32"),
    ({"kv_lens": jnp.zeros((3,), jnp.int32)}, r"kv_lens of shape \(4,\), got \(3,\)"),
    ({"kv_lens": jnp.zeros((4,))}, "kv_lens of an integer dtype, got float32"),
    ({"cu_q_lens": jnp.zeros((4,), jnp.int32)}, r"cu_q_lens of shape \(5,\), got \(4,\)"),
    ({"page_table": jnp.zeros((4, 3))}, "page_table of an integer dtype, got float32"),
    ({"sinks": jnp.zeros((2,))}, r"sinks of shape \(4,\), got \(2,\)"),
    ({"options": {"scale": 1.0, "window": 0}}, "a window of at least 1 or None, got 0"),
    ({"options": {"scale": 1.0, "softcap": -1.0}}, "a positive softcap or None, got -1.0"),
    ({"options": {"scale": 1.0, "alibi_slopes": jnp.zeros(2)}}, r"alibi_slopes of shape \(4,\), got \(2,\)"),
    ({"options": {"scale": 1.0, "alibi_slopes": jnp.zeros(4), "softcap": 1.0}}, "softcap or alibi_slopes, got both"),
    ({"options": {"scale": 1.0, "prefix_lens": jnp.zeros(3, jnp.int32)}}, r"prefix_lens of shape \(4,\), got \(3,\)"),
    ({"options": {"scale": 1.0, **SCALES}}, "kv_scales with a pool of int8 or float8_e4m3fn and with no other"),
    (
        {"pool": jnp.zeros((9, 2, 16, 64), jnp.int8), "options": {"scale": 1.0, **SCALES, "v_scale": jnp.zeros(3)}},
        r"kv_scales.v of shape \(2,\), got \(3,\)",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_does_not_fit_is_refused(change, message):
    case = paged_case().with_(**change)
    with pytest.raises(InvalidArgumentError, match=message):
        paged_attention(*case.args)


def test_a_dtype_the_kernel_lacks_goes_to_the_reference():
    case = paged_case(pool_dtype="float8_e5m2")
    assert registry.implementation_for("paged_attention", *case.args).name == "reference"
    check("reference", case)
    with pytest.raises(InvalidArgumentError, match="pool is float8_e5m2; the kernel has"):
        run("cpu-ffi", case)


class TorchOps(torch.nn.Module):
    """Model code that calls the torch operators."""

    def forward(self, arrays, *, options, one_each):
        op = torch.ops.torchax_serve.decode_attention if one_each else torch.ops.torchax_serve.paged_attention
        return op(*arrays, **options)


@pytest.mark.parametrize(
    "features",
    [
        {"alibi": True, "window": 9},
        {"prefix_lens": (5, 0, 40, 3), "sinks": True},
        {"pool_dtype": "int8", "alibi": True},
        {"images": IMAGES},
    ],
)
def test_torch_operators_take_the_features_of_the_ops(features):
    one_each = not features.keys() & {"prefix_lens", "images"}
    q_lens, kv_lens = ((1, 1, 1), (5, 33, 40)) if one_each else ((5, 1, 17, 1), (5, 33, 40, 64))
    case = paged_case(q_lens=q_lens, kv_lens=kv_lens, **features)
    custom_ops.install()
    arrays = [*case.args[:-1], case.sinks]
    if one_each:
        del arrays[6]  # where each begins
    found, pool = functional_call(TorchOps())({}, (arrays,), {"options": case.options, "one_each": one_each})
    expected, expected_pool = exact_paged(case)
    assert_close(found, expected)
    np.testing.assert_array_equal(np.asarray(pool, np.float64), np.asarray(expected_pool, np.float64))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_of_an_image_see_later_ones(implementation):
    """An image over several pieces of work, blocks of keys and spans; without it the result is another."""
    case = paged_case(q_lens=(9, 700, 1), kv_lens=(50, 760, 33), dim=16, page=32, images=((1, 7), (30, 660)))
    check(implementation, case)
    out = run(implementation, case)[0]
    options = {name: value for name, value in case.options.items() if name != "sees_until"}
    causal = run(implementation, case.with_(options=options))[0]
    differs = np.abs(np.asarray(out - causal)).max((1, 2)) > 1e-3
    assert np.flatnonzero(differs).tolist() == [*range(1, 6), *range(30, 659)]


def test_a_token_of_an_image_has_the_same_bits_in_any_batch():
    case = paged_case(q_lens=(1, 40, 3), kv_lens=(50, 90, 3), dim=16, images=((5, 30),))
    alone = case.with_(
        **{name: getattr(case, name)[1:41] for name in "qkv"},
        page_table=case.page_table[1:2],
        kv_lens=case.kv_lens[1:2],
        cu_q_lens=jnp.array([0, 40], jnp.int32),
        options={**case.options, "sees_until": case.options["sees_until"][1:41]},
    )
    np.testing.assert_array_equal(run("cpu-ffi", case)[0][1:41], run("cpu-ffi", alone)[0])
