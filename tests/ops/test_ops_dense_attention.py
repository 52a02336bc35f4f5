"""Dense attention against torch's own: whole, in blocks, and in the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ops_oracle import softmax

from model_adapters import ops
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import AttentionArgs, registry

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2}
RNG = np.random.default_rng(0)


def inputs(batch, heads, group, num_queries, num_keys, dim, value_dim):
    shapes = (
        (batch, heads * group, num_queries, dim),
        (batch, heads, num_keys, dim),
        (batch, heads, num_keys, value_dim),
    )
    return [RNG.standard_normal(shape, dtype=np.float32) for shape in shapes]


def torch_attention(q, k, v, dtype, **options):
    group = q.shape[1] // k.shape[1]
    q, k, v = (torch.from_numpy(x).to(TORCH[dtype]) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).float().numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "implementation"),
    [
        ((2, 2, 2, 5, 9, 16, 8), "reference"),
        ((1, 1, 1, 1, 6, 24, 24), "reference"),
        ((1, 2, 3, 1, 1, 8, 8), "reference"),
        ((2, 1, 2, 600, 700, 16, 8), "blocked"),
        ((2, 1, 2, 600, 700, 16, 8), "cpu-ffi"),
        ((1, 2, 1, 120, 3, 20, 20), "cpu-ffi"),
        ((2, 2, 2, 9, 65, 64, 64), "cpu-ffi"),
    ],
)
@pytest.mark.parametrize("mask_shape", [(1, 1, 1, 1), (1, 1, 0, 0), (1, 0, 0, 0)])
def test_masks_as_torch(shape, implementation, mask_shape, dtype):
    q, k, v = inputs(*shape)
    full = (shape[0], shape[1] * shape[2], shape[3], shape[4])
    mask = RNG.random([1 if fixed == 0 else n for fixed, n in zip([1, *mask_shape[1:]], full, strict=True)]) > 0.3
    mask[..., -1, :] = False  # a query that sees nothing
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    args = (*arrays, jnp.asarray(mask), AttentionArgs(0.3))
    expected = torch_attention(q, k, v, dtype, attn_mask=torch.from_numpy(mask), scale=0.3)
    with registry.use("dense_attention", implementation):
        got = ops.dense_attention(*args)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not np.asarray(got)[..., -1, :].any()


@pytest.mark.parametrize(
    ("shape", "options", "name"),
    [
        ((1, 2, 1, 9, 9, 8, 8), {}, "cpu-ffi"),
        ((1, 2, 1, 600, 600, 8, 8), {"causal": True}, "cpu-ffi"),
        ((1, 2, 1, 8, 600, 8, 8), {}, "reference"),
        ((1, 2, 1, 600, 700, 8, 8), {"causal": True}, "blocked"),
        ((1, 2, 1, 600, 600, 8, 8), {"return_weights": True}, "reference"),
    ],
)
def test_the_kernel_takes_what_it_has(shape, options, name):
    q, k, v = map(jnp.asarray, inputs(*shape))
    asked = {"causal": False, "return_weights": False} | options
    assert registry.implementation_for("dense_attention", q, k, v, None, AttentionArgs(1.0), **asked).name == name


def test_derivatives_as_torch():
    q, k, v = inputs(1, 2, 2, 20, 30, 8, 8)
    mask = RNG.standard_normal((1, 1, 20, 30), dtype=np.float32)
    weights = RNG.standard_normal((1, 4, 20, 8), dtype=np.float32)
    given = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, mask)]
    out = torch.nn.functional.scaled_dot_product_attention(*given, scale=0.3, enable_gqa=True)
    expected = torch.autograd.grad((out * torch.from_numpy(weights)).sum(), given)

    def weighted(q, k, v, mask):
        return (ops.dense_attention(q, k, v, mask, AttentionArgs(0.3)) * weights).sum()

    for got, right in zip(jax.jit(jax.grad(weighted, (0, 1, 2, 3)))(q, k, v, mask), expected, strict=True):
        np.testing.assert_allclose(got, right.numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mask_shape", [None, (1, 1, 1, 40), (3, 1, 1, 1, 40), (3, 2, 4, 12, 40), (2, 1, 12, 40)])
def test_rows_of_a_vmap_are_one_batch(mask_shape):
    q, k, v = (np.stack(each) for each in zip(*(inputs(2, 2, 2, 12, 40, 8, 8) for _ in range(3)), strict=True))
    mask = None if mask_shape is None else RNG.standard_normal(mask_shape, dtype=np.float32)
    is_mapped = mask is not None and mask.ndim == 5

    def attend(q, k, v, mask):
        return ops.dense_attention(q, k, v, mask, AttentionArgs(0.3))

    got = jax.jit(jax.vmap(attend, (0, 0, 0, 0 if is_mapped else None)))(q, k, v, mask)
    for row in range(3):
        own = mask[row] if is_mapped else mask
        with registry.use("dense_attention", "reference"):
            expected = attend(*(jnp.asarray(x[row]) for x in (q, k, v)), own if own is None else jnp.asarray(own))
        np.testing.assert_allclose(got[row], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_keys", [300, 600, 1000])
def test_causal_blocks_as_torch(num_keys):
    q, k, v = inputs(1, 2, 2, 600, num_keys, 16, 16)
    padding = np.arange(num_keys) >= 3
    causal = np.tril(np.ones((600, num_keys), bool))
    expected = torch_attention(q, k, v, "float32", attn_mask=torch.from_numpy(causal & padding), scale=0.25)
    got = ops.dense_attention(q, k, v, jnp.asarray(padding[None, None, None]), AttentionArgs(0.25), causal=True)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("value", ["-inf", "finfo.min"])
def test_additive_masks_as_torch(value):
    q, k, v = inputs(2, 1, 2, 4, 6, 8, 8)
    mask = RNG.standard_normal((2, 1, 4, 6), dtype=np.float32)
    mask[:, :, 1:, 4:] = mask[:, :, 2] = -np.inf if value == "-inf" else np.finfo(np.float32).min
    expected = torch_attention(q, k, v, "float32", attn_mask=torch.from_numpy(mask), scale=0.5)
    got = ops.dense_attention(q, k, v, jnp.asarray(mask), AttentionArgs(0.5))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    uniform = np.repeat(v.mean(axis=2), 2, axis=1)
    np.testing.assert_allclose(got[:, :, 2], 0 * uniform if value == "-inf" else uniform, rtol=2e-5, atol=2e-5)


def test_softcap_sinks_and_weights_by_hand():
    q, k, v = inputs(1, 2, 2, 3, 5, 8, 8)
    sinks = RNG.standard_normal(4).astype(np.float32)
    args = AttentionArgs(0.5, softcap=2.0, sinks=jnp.asarray(sinks))
    out, weights = ops.dense_attention(q, k, v, None, args, causal=True, return_weights=True)
    for head in range(4):
        scores = 2.0 * np.tanh(q[0, head].astype(np.float64) @ k[0, head // 2].T * 0.5 / 2.0)
        for query in range(3):
            share = np.zeros(5)
            share[: query + 1] = softmax(scores[query, : query + 1], sinks[head])
            np.testing.assert_allclose(weights[0, head, query], share, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(out[0, head, query], share @ v[0, head // 2], rtol=1e-5, atol=1e-5)


def test_blocks_give_what_the_whole_gives_with_sinks_and_softcap():
    q, k, v = inputs(1, 2, 2, 700, 700, 16, 16)
    sinks = jnp.asarray(RNG.standard_normal(4), jnp.float32)
    args = AttentionArgs(0.3, softcap=5.0, sinks=sinks)
    results = []
    for name in ("reference", "blocked", "cpu-ffi"):
        with registry.use("dense_attention", name):
            results.append(ops.dense_attention(q, k, v, None, args, causal=True))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((1, 3, 5, 8))}, "expected q.*got"),
        ({"q": jnp.zeros((1, 3, 3, 8))}, "query heads a multiple of kv heads"),
        ({"mask": jnp.zeros((1, 1, 3, 4))}, r"a mask that broadcasts to \[1, 4, 3, 5\], got \[1, 1, 3, 4\]"),
        ({"mask": jnp.zeros((3, 5))}, r"got \[3, 5\]"),
        ({"args": AttentionArgs(1.0, sinks=jnp.zeros(3))}, r"sinks of shape \[4\], got \[3\]"),
        ({"args": AttentionArgs(1.0, softcap=0.0)}, "a positive softcap or None, got 0.0"),
        ({"args": AttentionArgs(1.0, window=3)}, "all else in the mask, got window is not implemented"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    good = {"q": jnp.zeros((1, 4, 3, 8)), "k": jnp.zeros((1, 2, 5, 8)), "v": jnp.zeros((1, 2, 5, 8))}
    good |= {"mask": None, "args": AttentionArgs(1.0)}
    with pytest.raises(InvalidArgumentError, match=message):
        ops.dense_attention(**{**good, **change})
