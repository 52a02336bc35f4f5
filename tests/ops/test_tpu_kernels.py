"""The TPU kernels in interpret mode, which simulates memories, DMAs and semaphores, against float64 loops.

Memory begins as NaN, a DMA happens no sooner than somebody waits for it, and accesses that nothing orders are reported.
"""

import functools
import itertools
from contextlib import contextmanager
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_tpu import PARAMS
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from ops_oracle import assert_close
from paged_oracle import exact_paged, paged_case
from thorough import pairs, thorough

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import KVScales, decode_attention, paged_attention, use
from model_adapters.ops.kv_pool import write_tokens_at
from model_adapters.ops.tpu import int8_matmul
from model_adapters.ops.tpu.kv_write import write_tokens
from model_adapters.ops.tpu.page_buffers import Blocks

DTYPES = (
    ("float32", None),
    ("bfloat16", None),
    ("float32", "bfloat16"),
    ("bfloat16", "int8"),
    ("float32", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "float8_e4m3fn"),
)
IN_8_BITS = ("int8", "float8_e4m3fn")
FEATURES = ({}, {"window": 9}, {"softcap": 3.0}, {"sinks": True}, {"alibi": True, "window": 40}, {"sinks": True})
GROUPS = (1, 2, 3, 4, 8, 16)


@contextmanager
def interpreted(op):
    """Calls of `op` inside the block run its TPU kernel in interpret mode."""
    with use(op, "tpu-pallas"), pltpu.force_tpu_interpret_mode(PARAMS):
        try:
            yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()


def run_paged(case):
    with interpreted("paged_attention"):
        return jax.block_until_ready(jax.jit(lambda *args: paged_attention(*args))(*case.args))


def run_decode(case, starts=None, multiplies_int8=False):
    """`case`, whose sequences have one new token each, as decode_attention where int8 is multiplied or not."""
    starts = jnp.zeros_like(case.kv_lens) if starts is None else starts
    args = (case.q, case.k, case.v, case.pool, case.page_table, case.kv_lens, starts, case.attention_args)
    with interpreted("decode_attention"), mock.patch.object(int8_matmul, "multiplies_int8", lambda: multiplies_int8):
        return jax.block_until_ready(jax.jit(lambda *args: decode_attention(*args))(*args))


def check(made, case, capfd):
    out, pool = made
    expected, expected_pool = exact_paged(case)
    assert (out.dtype, pool.dtype) == (case.q.dtype, case.pool.dtype)
    if case.q.dtype == jnp.bfloat16:
        # One rounding of the output, and one of the weights before their product with values of about 1.
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8, atol=2**-8)
    else:
        assert_close(out, expected)
    np.testing.assert_array_equal(np.asarray(pool, np.float64), np.asarray(expected_pool, np.float64))
    assert "RACE DETECTED" not in capfd.readouterr().out


def check_decode(case, capfd):
    for multiplies_int8 in (False, True) if case.pool.dtype == jnp.int8 else (False,):
        check(run_decode(case, multiplies_int8=multiplies_int8), case, capfd)


def spare_of(dim, value_dim=None):
    """What a pool's rows are to be longer by, to be a multiple of 128."""
    return -(dim + (value_dim or dim)) % 128


def grid(offset, num_variants, kept):
    """Cases for each head size, with groups, dtypes, pages and features that change at different paces.

    One of each head size in `kept` runs by default.
    """
    for i, (dim, j) in enumerate(itertools.product((64, 80, 96, 128, 256), range(num_variants))):
        dtype, pool_dtype = DTYPES[(i + offset) % len(DTYPES)]
        page = (32, 64)[i % 2] if pool_dtype in IN_8_BITS else (16, 32, 64)[(i + j) % 3]
        group, features = GROUPS[(i + offset) % len(GROUPS)], FEATURES[(i + j + offset) % len(FEATURES)]
        heads = 1 + (i + offset) % 2 if group < 8 else 1
        options = {"dim": dim, "group": group, "page": page, "spare": spare_of(dim), "heads": heads}
        name = f"{dim}x{group}x{heads} page{page} {dtype} {pool_dtype} {','.join(features)}"
        options |= {"dtype": dtype, "pool_dtype": pool_dtype, **features}
        always = dim in kept and (i // num_variants + j) % 2 == 0
        yield pytest.param(options, id=name) if always else thorough(options, name=name)


@pytest.mark.parametrize("options", list(grid(0, 2, kept=(64, 80))))
def test_decode_over_head_sizes_groups_pages_and_dtypes(options, capfd):
    page = options["page"]
    case = paged_case(q_lens=(1,) * 5, kv_lens=(1, page, page + 1, 3 * page - 1, 0), seed=7, **options)
    check_decode(case, capfd)


@pytest.mark.parametrize("options", list(grid(3, 1, kept=(64,))))
def test_ragged_over_head_sizes_groups_pages_and_dtypes(options, capfd):
    page = options["page"]
    case = paged_case(
        q_lens=(5, 1, 0, 22, 1), kv_lens=(5, page + 1, 0, 2 * page + 20, 2 * page), padding=9, seed=8, **options
    )
    check(run_paged(case), case, capfd)


@pytest.mark.parametrize(
    "options",
    [
        {"page": 64, "pool_dtype": None},
        thorough({"page": 64, "pool_dtype": None, "window": 4300, "free_behind_window": True}),
        thorough({"page": 64, "pool_dtype": "int8", "window": 3000}),
    ],
    ids=str,
)
def test_decode_of_several_blocks(options, capfd):
    # Blocks are 4096 keys at most: rows of a part of one, of one and a part, and of one.
    # The first two leave much of either half of the buffer as it was.
    case = paged_case(
        q_lens=(1,) * 4, kv_lens=(5, 9, 4600, 4096), heads=1, group=2, dim=64, sinks=True, seed=3, **options
    )
    check_decode(case, capfd)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16", "heads": 2, "sinks": True},
        thorough({"window": 272, "free_behind_window": True}),  # rows longer than that begin with a page, but for one
        thorough({"pool_dtype": "int8", "page": 32, "alibi": True}),
    ],
    ids=str,
)
def test_decode_of_rows_of_many_blocks(options, capfd):
    # Blocks are 64 keys here. Whole ones are followed by whole ones, by parts and by nothing, of their row or a later
    # one; the last of a row is an eighth of one and more. Some rows see nothing.
    kv_lens = (448, 336, 301, 272, 0, 5, 256, 0, 150)
    options = {"page": 16, "heads": 1, "group": 2, "dim": 64, **options}
    case = paged_case(q_lens=(1,) * len(kv_lens), kv_lens=kv_lens, seed=11, **options)
    with mock.patch.object(Blocks, "of", functools.partial(Blocks.of, max_len=64)):
        check_decode(case, capfd)


@pytest.mark.parametrize(("heads", "group", "dim"), [(4, 4, 64), (6, 2, 128), thorough(4, 4, 128), thorough(6, 2, 64)])
def test_decode_of_heads_side_by_side(heads, group, dim, capfd):
    # Pairs of heads whose rows are whole tiles have a softmax each; those of the second case share tiles.
    options = {"dtype": "bfloat16", "pool_dtype": "int8" if heads == 4 else None, "sinks": True, "alibi": True}
    case = paged_case(
        q_lens=(1,) * 3, kv_lens=(70, 33, 64), heads=heads, group=group, dim=dim, page=32, seed=9, **options
    )
    check_decode(case, capfd)


def test_products_of_rows_and_int8_keep_20_bits():
    # Weights that together are a tenth of the largest one, beside it; queries over many powers of two.
    rng = np.random.default_rng(1)
    q = rng.standard_normal((8, 128)) * 2.0 ** -rng.integers(0, 12, (8, 128))
    weights = np.full((8, 4096), 0.1 / 4096)
    weights[:, 7] = 1
    matrix = rng.integers(-127, 128, (4096, 128))

    def kernel(q, weights, matrix, products, sums):
        products[...] = int8_matmul.times_keys(q[...], matrix[...])
        sums[...] = int8_matmul.times_values(weights[...], matrix[...])

    shapes = [jax.ShapeDtypeStruct((8, n), jnp.float32) for n in (4096, 128)]
    q, weights = (np.asarray(x, np.float32) for x in (q, weights))
    with pltpu.force_tpu_interpret_mode(PARAMS):
        products, sums = pl.pallas_call(kernel, out_shape=shapes)(q, weights, matrix.astype(np.int8))
    np.testing.assert_allclose(products, q.astype(np.float64) @ matrix.T, rtol=0, atol=2**-20 * np.abs(products).max())
    np.testing.assert_allclose(sums, weights.astype(np.float64) @ matrix, rtol=0, atol=2**-20 * np.abs(sums).max())


@pytest.mark.parametrize("window", [thorough(None), 300])
def test_ragged_of_several_blocks_and_blocks_of_queries(window, capfd):
    # Blocks are 1024 keys and 128 queries; the last sequence begins inside of one.
    case = paged_case(
        q_lens=(130, 1, 18), kv_lens=(1100, 1025, 1030), heads=1, group=2, dim=64, page=64, window=window, seed=4
    )
    check(run_paged(case), case, capfd)


@pytest.mark.parametrize("window", [thorough(None), 6])
def test_a_beginning_that_all_queries_see(window, capfd):
    # The first sequence fills more than one block of queries, and its beginning ends in the second.
    case = paged_case(
        q_lens=(135, 1, 6), kv_lens=(140, 33, 40), prefix_lens=(139, 50, 7), dim=64, heads=1, window=window, seed=5
    )
    check(run_paged(case), case, capfd)


@pytest.mark.parametrize("window", [thorough(None), 20])
def test_tokens_of_an_image_see_each_other(window, capfd):
    # One image ends in the second block of queries, one has a part of a narrow item, and padding follows.
    images = ((3, 133), (136, 141))
    case = paged_case(
        q_lens=(135, 1, 6), kv_lens=(150, 33, 40), images=images, dim=64, heads=1, window=window, sinks=True, seed=5
    )
    check(run_paged(case), case, capfd)


@pytest.mark.parametrize(("in_runs", "dtype"), pairs([True, False], IN_8_BITS, one_in=2))
def test_more_tokens_in_8_bits_than_are_written_at_once(in_runs, dtype, capfd):
    # 32 tiles of a page each are one group; the first is on its way back while the third is to take its place.
    rng = np.random.default_rng(6)
    num_tokens, heads, dim = 70, 1, 64
    pool = jnp.asarray(rng.integers(-127, 128, (num_tokens + 3, heads, 32, 2 * dim)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((num_tokens, heads, dim)), jnp.float32) for _ in range(2))
    table = jnp.asarray(1 + rng.permutation(num_tokens + 2)[:num_tokens, None], jnp.int32)
    seqs = jnp.arange(num_tokens, dtype=jnp.int32)
    positions = jnp.asarray(rng.integers(-2, 34, num_tokens), jnp.int32)
    scale = jnp.full((heads,), 0.03, jnp.float32)
    expected = write_tokens_at(pool, table, seqs, positions, k, v, KVScales(scale, scale))
    with interpreted("decode_attention"):
        made = write_tokens(pool, table, seqs, positions, k, v, KVScales(scale, scale), in_runs=in_runs)
        np.testing.assert_array_equal(made, expected)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_values_of_another_size(capfd):
    case = paged_case(q_lens=(1, 1), kv_lens=(30, 7), dim=192, value_dim=128, spare=spare_of(192, 128))
    check_decode(case, capfd)
    check(run_paged(case), case, capfd)


@pytest.mark.parametrize(("dtype", "pool_dtype", "value_begin"), [("bfloat16", "int8", 0), ("float32", None, 8)])
def test_values_are_columns_of_keys(dtype, pool_dtype, value_begin, capfd):
    latents = {"heads": 1, "group": 16, "dim": 192, "value_dim": 128, "value_begin": value_begin, "spare": 64}
    dtypes = {"dtype": dtype, "pool_dtype": pool_dtype}
    case = paged_case(q_lens=(1, 1), kv_lens=(70, 7), page=32, **latents, **dtypes)
    check_decode(case, capfd)
    check(run_paged(case), case, capfd)


def test_a_pool_with_one_page_per_row(capfd):
    case = paged_case(q_lens=(1, 1, 1), kv_lens=(500, 257, 256), dim=64, page=512)
    check_decode(case, capfd)


def test_starts_hide_what_is_before_them(capfd):
    case = paged_case(q_lens=(1,) * 6, kv_lens=(33, 33, 40, 5, 64, 50), dim=64, sinks=True)
    starts = jnp.array([0, 33, 39, 9, 17, 49], jnp.int32)
    out, pool = run_decode(case, starts)
    with use("decode_attention", "reference"):
        args = (case.q, case.k, case.v, case.pool, case.page_table, case.kv_lens, starts, case.attention_args)
        expected, expected_pool = decode_attention(*args)
    np.testing.assert_array_equal(out[jnp.array([1, 3])], 0)
    assert_close(out, np.asarray(expected, np.float64))
    np.testing.assert_array_equal(pool, expected_pool)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("run", [run_decode, run_paged])
def test_a_row_with_nan_spoils_no_other(run, capfd):
    # Either half of the buffer holds a long row of NaN before it holds the beginning of another row.
    case = paged_case(q_lens=(1,) * 5, kv_lens=(200, 190, 33, 7, 150), dim=64, seed=12)
    spoilt = jnp.array([0, 1])
    pool = case.pool.at[case.page_table[spoilt]].set(jnp.nan)
    out, _ = run(case.with_(pool=pool, v=case.v.at[spoilt].set(jnp.nan)))
    assert jnp.isnan(out[spoilt]).all()
    assert_close(out[2:], exact_paged(case)[0][2:])
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("pool_dtype", "multiplies_int8"),
    [(None, False), thorough("int8", False), ("int8", True), thorough("float8_e4m3fn", False)],
)
def test_nothing_is_written_or_read_outside(pool_dtype, multiplies_int8, capfd):
    # Lengths beyond the pages, negative ones, pages outside of the pool: as the reference has it.
    page = 32
    case = paged_case(q_lens=(1,) * 4, kv_lens=(3, 40, 64, 7), dim=64, page=page, pool_dtype=pool_dtype, seed=2)
    case = case.with_(pool=jnp.nan_to_num(case.pool))
    table = case.page_table.at[0, 0].set(-1).at[3, 0].set(10**6)
    case = case.with_(page_table=table, kv_lens=jnp.array([3, 10**6, -2, 7], jnp.int32))
    out, pool = run_decode(case, multiplies_int8=multiplies_int8)
    with use("decode_attention", "reference"):
        args = (case.q, case.k, case.v, case.pool, table, case.kv_lens, jnp.zeros(4, jnp.int32), case.attention_args)
        expected, expected_pool = decode_attention(*args)
    assert_close(out, np.asarray(expected, np.float64))
    np.testing.assert_array_equal(pool, expected_pool)
    np.testing.assert_array_equal(pool, case.pool)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dim": 80}, "rows of the pool have 160 elements; the kernel needs a multiple of 128"),
        ({"dim": 64, "page": 8, "dtype": "bfloat16"}, "pages of 8 positions; the kernel needs a multiple of 16"),
        ({"dim": 64, "page": 16, "pool_dtype": "int8"}, "pages of 16 positions; the kernel needs a multiple of 32"),
        ({"dim": 64, "dtype": "float16"}, "q is float16 and pool float16"),
        ({"dim": 64, "pool_dtype": "float8_e5m2"}, "q is float32 and pool float8_e5m2"),
    ],
    ids=str,
)
def test_what_the_kernels_lack_is_refused(options, reason):
    case = paged_case(q_lens=(1, 1), kv_lens=(9, 20), **options)
    for run in (run_decode, run_paged):
        with pytest.raises(InvalidArgumentError, match=reason):
            run(case)
