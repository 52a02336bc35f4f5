"""Pages of one sequence under vmap, beside NumPy; and C++ kernels under vmap, beside one call a row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_adapters.ops import activation, linear, registry, rms_norm, row_sum
from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.ops.cpu import ffi
from model_adapters.ops.decode_attention import decode_attention
from model_adapters.ops.decode_attention import reference as plain_attention
from model_adapters.ops.kv_pool import write_at
from model_adapters.ops.linear import batched_sums
from model_adapters.ops.row_pages import attend_row, read_row, write_row

PAGES, HEADS, PAGE, WIDTH = 7, 2, 4, 6
TABLE = np.array([[3, 1, 0], [5, 2, 6], [4, 0, 0]], np.int32)
DTYPES = ["float32", "bfloat16"]


def numbers(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def pool_of(dtype):
    return numbers((PAGES, HEADS, PAGE, WIDTH), dtype)


@pytest.fixture(params=["kernels", "references"])
def implementation(request, monkeypatch):
    if request.param == "references":
        monkeypatch.setattr("model_adapters.ops.row_pages.has_copy_kernels", lambda is_on_mesh: False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_vmap_write_to_one_pool(dtype, implementation):
    pool, tokens = pool_of(dtype), numbers((3, 2, HEADS, WIDTH), dtype, 1)
    positions = np.array([[3, 4], [11, 12], [-1, 0]], np.int32)  # 12 is behind the pages
    expected = np.array(pool)
    for row in range(3):
        for token in range(2):
            position = positions[row, token]
            if 0 <= position < TABLE.shape[1] * PAGE:
                expected[TABLE[row, position // PAGE], :, position % PAGE] = np.asarray(tokens[row, token])
    write = jax.jit(jax.vmap(write_row, in_axes=(None, 0, 0, 0), out_axes=None))
    np.testing.assert_array_equal(np.asarray(write(pool, TABLE, positions, tokens)), expected)
    one = jax.jit(write_row)(pool, TABLE[0], positions[0], tokens[0])
    expected_one = np.array(pool)
    for token, position in enumerate(positions[0]):
        expected_one[TABLE[0, position // PAGE], :, position % PAGE] = np.asarray(tokens[0, token])
    np.testing.assert_array_equal(np.asarray(one), expected_one)


@pytest.mark.parametrize("columns", [slice(None), slice(4), slice(4, None)], ids=["all", "keys", "values"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_vmap_read_their_tokens_and_zeros_behind(dtype, columns, implementation):
    pool, lens = pool_of(dtype), np.array([5, 0, 4], np.int32)
    expected = np.zeros((3, HEADS, TABLE.shape[1] * PAGE, len(range(WIDTH)[columns])), pool.dtype)
    for row, length in enumerate(lens):
        for position in range(length):
            expected[row, :, position] = np.asarray(pool)[TABLE[row, position // PAGE], :, position % PAGE][:, columns]
    read = jax.jit(jax.vmap(partial(read_row, columns=columns), in_axes=(None, 0, 0)))
    np.testing.assert_array_equal(np.asarray(read(pool, TABLE, lens)), expected)


def test_a_pool_of_each_row_is_its_own():
    pools, tokens = numbers((3, PAGES, HEADS, PAGE, WIDTH)), numbers((3, 1, HEADS, WIDTH), seed=1)
    positions = jnp.zeros((3, 1), jnp.int32)
    got = jax.jit(jax.vmap(write_row))(pools, TABLE, positions, tokens)
    rows = [write_row(pools[i], TABLE[i], positions[i], tokens[i]) for i in range(3)]
    np.testing.assert_array_equal(np.asarray(got), np.stack(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_vmap_attend_to_their_pages(dtype):
    pool, lens = pool_of(dtype), jnp.array([6, 9, 3], jnp.int32)
    q, k, v = (numbers((3, 1, heads, 3), dtype, seed) for seed, heads in enumerate((4, HEADS, HEADS)))
    args = AttentionArgs(0.5, window=5, sinks=numbers((4,), seed=7))
    expected, pool_after = plain_attention(
        q[:, 0], k[:, 0], v[:, 0], pool, jnp.asarray(TABLE), lens, jnp.zeros(3, jnp.int32), args
    )
    run = jax.vmap(lambda pool, *row: attend_row(*row[:3], pool, *row[3:], args), (None, 0, 0, 0, 0, 0), (0, None))
    out, after = jax.jit(run)(pool, q, k, v, TABLE, lens)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(out[:, 0].astype("float32"), expected.astype("float32"), atol=tolerance)
    np.testing.assert_array_equal(np.asarray(after), np.asarray(pool_after))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_pool_is_copied(dtype):
    """The optimized module has no instruction of the pool's shape but what passes it on."""

    def step(pool, table, positions, tokens, lens):
        def one(pool, table, positions, tokens, length):
            pool = write_row(pool, table, positions, tokens)
            return pool, jnp.sum(read_row(pool, table, length).astype(jnp.float32))

        return jax.vmap(one, (None, 0, 0, 0, 0), (None, 0))(pool, table, positions, tokens, lens)

    tokens, lens = numbers((3, 1, HEADS, WIDTH), dtype), jnp.ones(3, jnp.int32)
    made = jax.jit(step, donate_argnums=0).lower(pool_of(dtype), TABLE, jnp.zeros((3, 1), jnp.int32), tokens, lens)
    shape = f"[{PAGES},{HEADS},{PAGE},{WIDTH}]"
    lines = [
        line
        for line in made.compile().as_text().splitlines()
        if f"= {'bf16' if dtype == 'bfloat16' else 'f32'}{shape}" in line
    ]
    assert any("tas_write_tokens" in line for line in lines)
    passing = ("parameter(", "custom-call(", "get-tuple-element(", "bitcast(")
    assert [line for line in lines if not any(each in line for each in passing)] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_offsets_that_differ_by_row_write_in_place(dtype):
    pools, new = numbers((3, 1, HEADS, 8, WIDTH), dtype), numbers((3, 1, HEADS, 2, WIDTH), dtype, 1)
    offsets = jnp.array([0, 6, 3], jnp.int32)
    expected = np.array(pools)
    for row, offset in enumerate(np.asarray(offsets)):
        expected[row, :, :, offset : offset + 2] = np.asarray(new[row])
    made = jax.jit(jax.vmap(write_at)).lower(pools, new, offsets).compile()
    assert " scatter(" not in made.as_text()
    np.testing.assert_array_equal(np.asarray(made(pools, new, offsets)), expected)


OPERANDS = numbers((5, 3, 32))
by_row = partial(batched_sums, is_input_major=False)
WEIGHT, BIAS = numbers((48, 32), seed=2), numbers((48,), seed=3)
CALLS = {
    "linear": (lambda x: linear(x, WEIGHT.astype(x.dtype), BIAS.astype(x.dtype)), "tas_linear"),
    "rms_norm": (lambda x: rms_norm(x, WEIGHT[0].astype(x.dtype), 1e-6, rounds_first=True), "tas_rms_norm"),
    "row_sum": (row_sum, "tas_row_sum"),
    "activation": (activation.silu, "tas_activation"),
    "batched": (lambda x: by_row(x[None], x[None]), "tas_routed_linear"),
    "shared": (
        lambda x: batched_sums(x[None], WEIGHT[None].astype(x.dtype), is_input_major=False),
        "tas_routed_linear",
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_rows_of_a_vmap_are_rows_of_one_call(name, dtype):
    function, target = CALLS[name]
    x = OPERANDS.astype(dtype)
    made = jax.jit(jax.vmap(function)).lower(x).compile()
    text = made.as_text()
    assert text.count(f'custom_call_target="{target}"') == 1 and " while(" not in text
    got, rows = made(x), [function(row) for row in x]
    tolerance = 1e-5 if dtype == "float32" else 4e-2
    np.testing.assert_allclose(got.astype("float32"), np.stack(rows).astype("float32"), rtol=tolerance, atol=tolerance)


def test_many_rows_of_a_vmap_go_where_many_rows_go(monkeypatch):
    monkeypatch.setattr(ffi, "max_linear_rows", lambda dtype: 8)
    x = numbers((16, 1, 32))
    made = jax.jit(jax.vmap(CALLS["linear"][0])).lower(x).compile()
    assert "tas_linear" not in made.as_text()
    np.testing.assert_allclose(made(x)[:, 0], np.asarray(x)[:, 0] @ np.asarray(WEIGHT).T + BIAS, rtol=1e-5, atol=1e-5)


def test_a_weight_of_each_row_is_its_own():
    x, weights = numbers((3, 2, 32)), numbers((3, 48, 32), seed=4)
    got = jax.jit(jax.vmap(linear))(x, weights)
    np.testing.assert_allclose(got, np.einsum("bnk,bmk->bnm", x, weights), rtol=1e-4, atol=1e-4)


def test_dense_caches_of_rows_under_a_vmap():
    """The kernel of `decode_attention` takes a cache for each row as pages of one pool."""
    pools = numbers((3, 2, HEADS, 8, WIDTH))
    q, k, v = (numbers((3, 2, heads, 3), seed=seed) for seed, heads in enumerate((4, HEADS, HEADS)))
    lens, starts = jnp.array([[3, 8], [1, 5], [2, 2]], jnp.int32), jnp.zeros((3, 2), jnp.int32)
    table = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32)[:, None], (3, 2, 1))
    args = AttentionArgs(0.5)
    got = jax.jit(jax.vmap(lambda *each: decode_attention(*each, args)))(q, k, v, pools, table, lens, starts)
    for row in range(3):
        with registry.use("decode_attention", registry.REFERENCE):
            expected = decode_attention(q[row], k[row], v[row], pools[row], table[row], lens[row], starts[row], args)
        for mine, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(mine[row], theirs, rtol=1e-5, atol=1e-5)
