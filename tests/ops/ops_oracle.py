"""Attention and grouped products in plain float64 loops, and the inputs that the tests of ops share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops import AttentionArgs, KVScales

TOLERANCE = {"float32": (2e-5, 2e-5), "bfloat16": (2**-8, 2e-3), "float16": (2**-10, 5e-4)}


def assert_close(got, expected):
    """`got` is as near to the exact `expected` as one rounding to its dtype, and sums in float32, allow."""
    rtol, atol = TOLERANCE[str(got.dtype)]
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=rtol, atol=atol)


def softmax(scores, sink=None):
    every = scores if sink is None else np.append(scores, sink)
    if not len(scores):
        return scores
    weights = np.exp(every - every.max())
    return (weights / weights.sum())[: len(scores)]


def attention_args(sinks=None, *, k_scale=None, v_scale=None, **options):
    """`AttentionArgs` of flat arguments, as the torch operators have them."""
    kv_scales = None if k_scale is None else KVScales(k_scale, v_scale)
    return AttentionArgs(sinks=sinks, kv_scales=kv_scales, **options)


@dataclass
class DecodeCase:
    """Inputs of one decode_attention call: rows of uneven length on shuffled pages."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    pool: jax.Array
    page_table: jax.Array
    lens: jax.Array
    starts: jax.Array
    sinks: jax.Array | None
    options: dict

    @property
    def args(self):
        arrays = (self.q, self.k, self.v, self.pool, self.page_table, self.lens, self.starts)
        return (*arrays, attention_args(self.sinks, **self.options))


def decode_case(
    *,
    batch=3,
    heads=2,
    group=2,
    dim=64,
    value_dim=None,
    page=16,
    num_pages=4,
    dtype="float32",
    pool_dtype=None,
    window=None,
    softcap=None,
    sinks=False,
    starts=False,
    lens=None,
    contiguous=False,
    value_begin=None,
    seed=0,
):
    rng = np.random.default_rng(seed)
    value_dim = dim if value_dim is None else value_dim

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtype)

    if contiguous:
        total, num_pages, table = batch, 1, np.arange(batch)[:, None]
    else:
        total = batch * num_pages + 2
        table = rng.permutation(total)[: batch * num_pages].reshape(batch, num_pages)
    lens = rng.integers(1, page * num_pages + 1, batch) if lens is None else np.asarray(lens)
    return DecodeCase(
        q=normal(batch, heads * group, dim),
        k=normal(batch, heads, dim),
        v=normal(batch, heads, value_dim) * (1 if value_begin is None else np.nan),
        pool=normal(total, heads, page, dim + value_dim * (value_begin is None)).astype(pool_dtype or dtype),
        page_table=jnp.asarray(table, jnp.int32),
        lens=jnp.asarray(lens, jnp.int32),
        starts=jnp.asarray(rng.integers(0, np.maximum(lens, 0) + 1) if starts else np.zeros(batch), jnp.int32),
        sinks=normal(heads * group) if sinks else None,
        options={"scale": dim**-0.5, "window": window, "softcap": softcap, "value_begin": value_begin},
    )


def exact_decode(case):
    """What decode_attention is to give, position by position: (out, pool) in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (case.q, case.k, case.v))
    value_begin = case.options["value_begin"]
    token = np.concatenate([case.k, case.v] if value_begin is None else [case.k], -1)
    token = token.astype(case.pool.dtype).astype(np.float64)
    pool, table = np.array(case.pool, np.float64), np.asarray(case.page_table)
    batch, query_heads, dim = q.shape
    heads, page = k.shape[1], pool.shape[2]
    window, softcap = case.options["window"], case.options["softcap"]
    out = np.zeros((batch, query_heads, v.shape[2]))
    for b in range(batch):
        length, first = int(case.lens[b]), int(case.starts[b])
        if length > 0:
            pool[table[b, (length - 1) // page], :, (length - 1) % page] = token[b]
        prefix_lens = case.options.get("prefix_lens")
        prefix = 0 if prefix_lens is None else int(prefix_lens[b])
        seen_at = [p for p in range(first, length) if window is None or p >= length - window or p < prefix]
        rows = [pool[table[b, p // page], :, p % page] for p in seen_at]
        for h in range(query_heads):
            if not rows:
                continue
            seen = np.stack(rows)[:, h // (query_heads // heads)]
            scores = seen[:, :dim] @ q[b, h] * case.options["scale"]
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            sink = None if case.sinks is None else float(case.sinks[h])
            out[b, h] = softmax(scores, sink) @ seen[:, dim if value_begin is None else value_begin :][:, : v.shape[2]]
    return out, pool
