"""The GPU kernels, interpreted, against float64 loops: decode steps and ragged runs of queries."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_oracle import assert_close, decode_case, exact_decode
from paged_oracle import exact_paged, paged_case
from thorough import except_for, pairs, thorough

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import AttentionArgs, decode_attention, on_platform, paged_attention, registry, use
from model_adapters.ops.gpu import hopper, launch, split_kv
from model_adapters.ops.gpu.triton_kernel import pieces
from model_adapters.ops.gpu.work_items import FIELDS, ragged_items

LONG = {"q_lens": (1, 1, 1, 1), "kv_lens": (1, 300, 128, 65)}  # long enough for splits, and at the edges of pages
MIXED = {"q_lens": (40, 1, 21, 1), "kv_lens": (40, 33, 150, 64)}  # a prefill, a chunk of one, and rows that decode
# Dims, groups, pages, dtypes of queries and pool: each value of each with several of the others.
GRID = (
    (64, 1, 16, "float32", "float32", {"sinks": True}),
    (64, 4, 64, "bfloat16", "bfloat16", {"window": 70}),
    (64, 16, 32, "bfloat16", "int8", {"softcap": 5.0}),
    (80, 2, 32, "float32", "bfloat16", {"window": 21, "sinks": True}),
    (80, 8, 16, "bfloat16", "float8_e4m3fn", {}),
    (96, 3, 64, "float32", "int8", {"alibi": True}),
    (96, 1, 32, "bfloat16", "bfloat16", {"softcap": 3.0, "window": 130}),
    (128, 2, 16, "float16", "float16", {"alibi": True, "sinks": True}),
    (128, 16, 64, "bfloat16", "bfloat16", {"sinks": True, "spare": 24}),
    (128, 5, 16, "float32", "float32", {"softcap": 10.0}),
    (256, 1, 64, "bfloat16", "int8", {"window": 9, "sinks": True}),
    (256, 2, 32, "float32", "float32", {"alibi": True, "window": 40}),
)
PREFIXES = ((3, 0, 90, 10), (40, 40, 0, 64))


@functools.cache
def compiled(op, implementation, num_programs):
    return jax.jit(lambda *args: op(*args))


def run(op, *args, implementation="gpu-triton"):
    with use(op.__name__, implementation):  # asked at the first call, when it is traced
        return compiled(op, implementation, split_kv.NUM_PROGRAMS)(*args)


def as_bits(pool):
    return np.asarray(pool).view(np.uint8)  # NaN is equal to itself


def check_ragged(case, **kwargs):
    out, pool = run(paged_attention, *case.args, **kwargs)
    expected, expected_pool = exact_paged(case)
    assert out.dtype == case.q.dtype
    assert_close(out, expected)
    np.testing.assert_array_equal(as_bits(pool), as_bits(expected_pool))


def check_decode(case, **kwargs):
    """A ragged case of one token each: what it gives is what the decode op has to give."""
    starts = jnp.zeros_like(case.kv_lens)
    args = (case.q, case.k, case.v, case.pool, case.page_table, case.kv_lens, starts, case.attention_args)
    out, pool = run(decode_attention, *args, **kwargs)
    expected, expected_pool = exact_paged(case)
    assert out.dtype == case.q.dtype
    assert_close(out, expected)
    np.testing.assert_array_equal(as_bits(pool), as_bits(expected_pool))


def case_of(row, index, **shape):
    dim, group, page, dtype, pool_dtype, features = row
    heads = 1 if group > 4 else 2
    return paged_case(
        dim=dim,
        group=group,
        page=page,
        dtype=dtype,
        pool_dtype=pool_dtype,
        heads=heads,
        seed=index,
        **shape,
        **features,
    )


INDICES = except_for(range(0, len(GRID), 2), range(len(GRID)))


@pytest.mark.parametrize("index", INDICES, ids=lambda i: "-".join(map(str, GRID[i][:5])))
def test_decode_over_dims_groups_pages_and_dtypes(index):
    check_decode(case_of(GRID[index], index, **LONG))


@pytest.mark.parametrize("index", except_for([0, 10], range(len(GRID))), ids=lambda i: "-".join(map(str, GRID[i][:5])))
def test_ragged_over_dims_groups_pages_and_dtypes(index):
    check_ragged(case_of(GRID[index], index, **MIXED))


@pytest.mark.parametrize("prefix_lens", PREFIXES)
@pytest.mark.parametrize("window", [None, 20])
def test_prefix(prefix_lens, window):
    """Sixteen heads of a group leave eight queries to an item: it sees more of the prefix than its own end."""
    case = paged_case(**MIXED, prefix_lens=prefix_lens, window=window, sinks=True, heads=1, group=16, padding=3)
    check_ragged(case)


@pytest.mark.parametrize(("window", "group"), [(None, 16), (20, 2), thorough(None, 128)])
def test_tokens_of_an_image_see_each_other(window, group):
    """An image over several items, and with a group of 128 one query to an item."""
    images = ((2, 37), (41, 50), (50, 61))
    case = paged_case(**MIXED, images=images, window=window, sinks=True, heads=1, group=group, padding=3)
    check_ragged(case)


@pytest.mark.parametrize(("value_begin", "pool_dtype"), [(0, None), (16, "int8")])
def test_values_are_columns_of_keys(value_begin, pool_dtype):
    latents = {"heads": 1, "group": 16, "dim": 80, "value_dim": 64, "value_begin": value_begin, "page": 32}
    check_decode(paged_case(**LONG | latents, pool_dtype=pool_dtype))
    check_ragged(paged_case(**MIXED | latents, pool_dtype=pool_dtype, padding=9))


def test_pages_freed_behind_the_window_are_not_read():
    check_ragged(paged_case(**MIXED, window=21, free_behind_window=True, padding=5))
    check_decode(paged_case(**LONG, window=21, free_behind_window=True))


def test_splits_change_nothing(monkeypatch):
    """Of a case with and without splits; `test_decode_over...` shows by its sinks and lengths that both are right."""
    for num_programs in (1, 1000):
        monkeypatch.setattr(split_kv, "NUM_PROGRAMS", num_programs)
        check_decode(paged_case(**LONG, sinks=True, dim=80, value_dim=48))
        check_ragged(paged_case(**MIXED, sinks=True, dim=80, value_dim=48, padding=9))


def test_splits_come_from_shapes():
    def num_splits(batch, capacity):
        q, v = jax.ShapeDtypeStruct((batch, 32, 128), jnp.bfloat16), jax.ShapeDtypeStruct((batch, 8, 128), jnp.bfloat16)
        pool = jax.ShapeDtypeStruct((1024, 8, 64, 256), jnp.bfloat16)
        return launch.tile_for(16, 1, batch, q, v, pool, capacity).num_splits

    assert [num_splits(batch, 8192) for batch in (1, 8, 32, 64)] == [64, 8, 2, 1]
    assert [num_splits(1, capacity) for capacity in (64, 128, 1024)] == [1, 1, 8]


@pytest.mark.parametrize("contiguous", [False, True])
def test_decode_with_left_padding_unused_rows_and_lengths_beyond_the_pages(contiguous):
    case = decode_case(
        batch=5, lens=(64, 1, 40, 0, 33), starts=True, sinks=True, contiguous=contiguous, page=64, group=3
    )
    out, pool = run(decode_attention, *case.args)
    expected, expected_pool = exact_decode(case)
    assert_close(out, expected)
    np.testing.assert_array_equal(np.asarray(pool, np.float64), expected_pool)


def test_a_length_beyond_the_pages_writes_nothing_and_attends_to_what_they_hold():
    case = decode_case(batch=2, lens=(40, 64), num_pages=4)
    args = list(case.args)
    args[5] = jnp.asarray((40, 66), jnp.int32)
    got = run(decode_attention, *args)
    expected = run(decode_attention, *args, implementation="reference")
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(got[1], expected[1])


def test_tokens_at_negative_positions_give_zeros_and_write_nothing():
    check_ragged(paged_case(q_lens=(9, 4, 3), kv_lens=(5, 4, 0), sinks=True, window=3))
    check_ragged(paged_case(q_lens=(9, 4, 3), kv_lens=(5, 4, 0), prefix_lens=(3, 3, 3)))
    # One query to an item: there is no row of another to mask.
    check_ragged(paged_case(q_lens=(9, 4, 3), kv_lens=(5, 4, 0), prefix_lens=(3, 3, 3), heads=1, group=128))


def test_pages_outside_the_pool_are_read_as_the_nearest():
    case = paged_case(**MIXED)
    case = case.with_(page_table=case.page_table.at[2, 0].set(10_000).at[0, 0].set(-3))
    pool = jnp.where(jnp.isnan(case.pool), jnp.sin(jnp.arange(case.pool.size)).reshape(case.pool.shape), case.pool)
    check_ragged(case.with_(pool=pool))


@given(
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
    st.sampled_from([(1, 1), (3, 1), (8, 1), (16, 1), (8, 8), (16, 8)]),
    st.booleans(),
)
@settings(max_examples=40)
def test_items_have_every_token_once(q_lens, sizes, is_full):
    block_len, alignment = sizes
    num_tokens = 64
    q_lens = np.asarray(q_lens)
    if is_full:  # no padding
        q_lens[2] = num_tokens - q_lens[0] - q_lens[1]
    cu_q_lens = jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32)
    kv_lens = jnp.asarray(q_lens + 3, jnp.int32)
    items = make_items(num_tokens, block_len, alignment, kv_lens, cu_q_lens)
    seen = np.zeros(num_tokens, int)
    for item in np.asarray(items):
        row = dict(zip(FIELDS, item.tolist(), strict=True))
        assert row["end"] - row["begin"] // alignment * alignment <= block_len
        seen[row["begin"] : row["end"]] += 1
        for token in range(row["begin"], row["end"]):
            if token < cu_q_lens[-1]:
                assert cu_q_lens[row["seq"]] <= token < cu_q_lens[row["seq"] + 1]
                assert row["high"] == row["end"] + row["shift"]
            else:
                assert row["high"] == 0
                assert token + row["shift"] < 0
    np.testing.assert_array_equal(seen, 1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def make_items(num_tokens, block_len, alignment, kv_lens, cu_q_lens):
    return ragged_items(num_tokens, block_len, 1024, kv_lens, cu_q_lens, AttentionArgs(1.0), alignment)


def test_pieces_cover_a_head_once():
    for dim in range(1, 577):
        parts = pieces(dim)
        assert parts[0].begin == 0
        assert sum(part.size for part in parts) >= dim > parts[-1].begin
        assert all(one.begin + one.size == other.begin for one, other in itertools.pairwise(parts))
        assert all(part.size >= 16 and part.size & (part.size - 1) == 0 and part.end == dim for part in parts)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "gpu-triton"),
        ({"dtype": "bfloat16"}, "gpu-triton"),
        ({"dtype": "bfloat16", "dim": 64, "alibi": True}, "gpu-triton"),
        ({"dtype": "bfloat16", "dim": 64, "images": ((0, 4),)}, "gpu-triton"),
        ({"dtype": "bfloat16", "dim": 64, "pool_dtype": "int8"}, "gpu-triton"),
        ({"dtype": "bfloat16", "dim": 64}, "gpu-mosaic" if hopper.PLATFORMS else "gpu-triton"),
    ],
)
def test_the_kernel_is_what_a_gpu_gets(changes, name):
    case = paged_case(**changes)
    with on_platform("gpu"):
        assert registry.implementation_for("paged_attention", *case.args).name == name
        starts = jnp.zeros_like(case.kv_lens)
        new = (case.q[:4], case.k[:4], case.v[:4])
        args = (*new, case.pool, case.page_table, case.kv_lens, starts, case.attention_args)
        if "images" not in changes:  # nothing is behind the newest token
            assert registry.implementation_for("decode_attention", *args).name == name
    assert registry.implementation_for("paged_attention", *case.args).name != "gpu-triton"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16", "pool_dtype": "bfloat16"}, "q is float16 and pool bfloat16; the kernel has"),
        ({"dim": 640}, "keys of 640 and values of 640; the kernel has room for 576"),
        ({"group": 160, "heads": 1}, "160 query heads read one kv head; the kernel has room for 128"),
        (
            {"group": 64, "heads": 1, "dim": 80},
            "64 query heads of 80 and 80 in float32; the kernel has too few registers",
        ),
    ],
)
def test_what_is_refused_says_why(changes, reason):
    case = paged_case(q_lens=(1,), kv_lens=(1,), **changes)
    with use("paged_attention", "gpu-triton"), pytest.raises(InvalidArgumentError, match=reason):
        paged_attention(*case.args)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "q is float32 and pool float32; the kernel has bfloat16"),
        ({"dtype": "bfloat16", "dim": 80}, "keys of 80 and values of 80; the kernel has multiples of 64 up to 256"),
        ({"dtype": "bfloat16", "dim": 256}, "keys of 256 and values of 256; the kernel has shared memory for 448"),
        ({"dtype": "bfloat16", "group": 65, "heads": 1, "dim": 64}, "65 query heads read one kv head; .* room for 64"),
        ({"dtype": "bfloat16", "page": 24, "dim": 64}, "pages of 24 positions; the kernel has 8, 16, 32 and multiples"),
        ({"dtype": "bfloat16", "dim": 64, "spare": 8}, "rows of the pool have 136 elements; .* a multiple of 64"),
        ({"dtype": "bfloat16", "dim": 64, "alibi": True}, "alibi_slopes is not implemented"),
    ],
)
def test_what_mosaic_refuses_says_why(changes, reason):
    case = paged_case(q_lens=(1,), kv_lens=(1,), **changes)
    args = (case.q, case.k, case.v, case.pool, case.page_table, case.kv_lens, jnp.zeros_like(case.kv_lens))
    args = (*args, case.attention_args)
    with use("decode_attention", "gpu-mosaic"):
        with on_platform("gpu"), pytest.raises(InvalidArgumentError, match=reason):
            decode_attention(*args)
        with on_platform("cpu"), pytest.raises(InvalidArgumentError, match="traced for a cpu; the kernel is for GPUs"):
            decode_attention(*args)


def test_a_pool_whose_elements_the_lowering_cannot_count_is_refused():
    """Offsets have 32 signed bits up to 4 GiB, and 64 above: three billion bytes fall between."""
    q, v = jax.ShapeDtypeStruct((1, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 8, 128), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    reasons = [
        launch.unsupported_reason(q, v, jax.ShapeDtypeStruct((num_pages, 8, 64, 256), dtype), table)
        for num_pages, dtype in ((20_000, jnp.int8), (40_000, jnp.int8), (20_000, jnp.bfloat16), (16_000, jnp.int8))
    ]
    assert reasons[0].startswith("a pool of 2621440000 elements in int8")
    assert reasons[1:] == [None, None, None]


def test_queries_of_a_group_are_in_one_tile_or_begin_with_one():
    """Copies by the tensor memory accelerator end with the tile of 8 rows they begin in; no interpreter shows it."""
    from model_adapters.ops.gpu.mosaic_kernel import StageSizes

    for group in range(1, 65):
        sizes = StageSizes(64, 64, 64, 8, 4, 1, group, 1.0, None, None)
        assert sizes.row_stride >= group
        for head in range(8):
            within = head * sizes.row_stride % 8
            assert within == 0 or within + group <= 8


@pytest.fixture
def warp_group_in_plain_arrays(monkeypatch):
    """Mosaic GPU's interpreter knows memories, barriers and copies, and of a warp group's products not all."""
    from jax import lax

    # The public names came with jax 0.11, without that of the races.
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

    from model_adapters.ops.gpu import mosaic_kernel, mosaic_prefill, warpgroup

    def product(left, right):
        return jnp.dot(left, right, preferred_element_type=jnp.float32)

    def scores(queries, keys, meanwhile=lambda: None):
        meanwhile()
        return product(queries[...], keys[...].T)

    def add_product(sums, weights, values, meanwhile):
        meanwhile()
        return sums + product(weights, values[...])

    monkeypatch.setattr(warpgroup, "scores", scores)
    monkeypatch.setattr(warpgroup, "add_product", add_product)
    monkeypatch.setattr(warpgroup, "row_iota", lambda num_rows: jnp.arange(num_rows))
    monkeypatch.setattr(warpgroup, "sums", lambda weights, values: product(weights, values[...]))
    monkeypatch.setattr(warpgroup, "iota", lambda shape, axis: lax.broadcasted_iota(jnp.int32, shape, axis))
    monkeypatch.setattr(warpgroup, "by_row", lambda x: x)
    monkeypatch.setattr(warpgroup, "by_tile", lambda x: x)
    monkeypatch.setattr(warpgroup, "load", lambda ref: ref[...])
    # Several units that copy, so that waiting for one of them does not stand for waiting for all.
    mode = params.InterpretGPUParams(
        detect_races=True, num_tma_threads_per_device=5, out_of_bounds_reads="uninitialized"
    )
    traced = mosaic_kernel.attend, mosaic_prefill.attend_runs
    for function in traced:
        function.clear_cache()
    with params.force_gpu_interpret_mode(mode), on_platform("gpu"):
        yield
    for function in traced:
        function.clear_cache()
    assert not interpret_pallas_call.get_races().races_found


SHAPES = [
    {"dim": 64, "page": 16, "sinks": True},
    {"dim": 128, "value_dim": 64, "page": 64, "window": 70, "group": 3, "spare": 64},
    {"dim": 64, "page": 128, "softcap": 5.0, "dtype": "float16", "heads": 1},
]


# Without splits a row has more blocks than there are stages.
@pytest.mark.parametrize(
    ("shape", "num_programs"),
    pairs(SHAPES, [1, 264], one_in=3),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_mosaic_decode(warp_group_in_plain_arrays, monkeypatch, shape, num_programs):
    monkeypatch.setattr(split_kv, "NUM_PROGRAMS", num_programs)
    check_decode(paged_case(**LONG, **{"dtype": "bfloat16", **shape}), implementation="gpu-mosaic")


@pytest.mark.parametrize(
    "shape",
    [
        {"dim": 64, "page": 16, "sinks": True, "padding": 5, "heads": 1},
        thorough({"dim": 128, "value_dim": 64, "page": 64, "window": 170, "group": 3, "spare": 64, "heads": 1}),
        thorough(
            {"dim": 64, "page": 128, "softcap": 5.0, "dtype": "float16", "heads": 2, "group": 8, "q_lens": (16, 3)}
        ),
        thorough({"dim": 192, "page": 8, "heads": 1, "group": 1, "q_lens": (2, 1)}),
    ],
    ids=lambda shape: "-".join(shape),
)
def test_mosaic_prefill(warp_group_in_plain_arrays, monkeypatch, shape):
    """Two sequences, of which one has more blocks of keys than there are stages."""
    from model_adapters.ops.gpu import mosaic_prefill

    monkeypatch.setattr(mosaic_prefill, "MAX_STAGES", 2)
    shape = {"q_lens": (70, 1), "kv_lens": (330, 33), "dtype": "bfloat16", **shape}
    check_ragged(paged_case(**shape), implementation="gpu-mosaic")
