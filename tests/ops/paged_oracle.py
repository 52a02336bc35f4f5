"""Paged attention of ragged queries in plain float64 loops, and the inputs that its tests share."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from ops_oracle import attention_args, softmax


@dataclass
class PagedCase:
    """Inputs of one paged_attention call: sequences of uneven length on shuffled pages, NaN wherever nothing lies."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    pool: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    sinks: jax.Array | None
    options: dict

    @property
    def args(self):
        arrays = (self.q, self.k, self.v, self.pool, self.page_table, self.kv_lens, self.cu_q_lens)
        return (*arrays, self.attention_args)

    @property
    def attention_args(self):
        return attention_args(self.sinks, **self.options)

    def with_(self, **changes):
        return replace(self, **changes)


def paged_case(
    *,
    q_lens=(5, 1, 17, 1),
    kv_lens=(5, 33, 40, 64),
    heads=2,
    group=2,
    dim=32,
    value_dim=None,
    page=16,
    dtype="float32",
    pool_dtype=None,
    spare=0,
    padding=0,
    window=None,
    softcap=None,
    sinks=False,
    alibi=False,
    prefix_lens=None,
    images=None,
    free_behind_window=False,
    value_begin=None,
    seed=0,
):
    """`images` are (begin, end) of tokens of one sequence that see each other, `end` excluded.

    With `value_begin` values are columns of keys, and what is given as values is NaN.
    """
    rng = np.random.default_rng(seed)
    value_dim = dim if value_dim is None else value_dim
    num_seqs, num_tokens = len(q_lens), sum(q_lens) + padding
    pages_per_seq = max(1, -(-max(kv_lens) // page)) + 1
    total = num_seqs * pages_per_seq + 3
    table = 1 + rng.permutation(total - 1)[: num_seqs * pages_per_seq].reshape(num_seqs, pages_per_seq)
    largest = {"int8": 127, "float8_e4m3fn": 448}.get(pool_dtype)  # in 8 bits there are scales

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtype)

    held = rng.standard_normal((total, heads, page, dim + value_dim * (value_begin is None)), dtype=np.float32)
    written = np.zeros((total, page), bool)
    for s, (length, new) in enumerate(zip(kv_lens, q_lens, strict=True)):
        first = max(0, length - new - window + 1) // page if free_behind_window else 0
        for p in range(pages_per_seq):
            if p * page >= length or p < first:
                table[s, p] = 0
        for p in range(first * page, length - new):
            written[table[s, p // page], p % page] = True
    held = np.pad(held, ((0, 0), (0, 0), (0, 0), (0, spare)))
    if largest:
        steps = np.rint(held * 40) if pool_dtype == "int8" else held * 40
        pool = jnp.asarray(np.clip(steps, -largest, largest), pool_dtype)
    else:
        pool = jnp.asarray(np.where(written[:, None, :, None], held, np.nan), pool_dtype or dtype)
    options = {"scale": dim**-0.5, "window": window, "softcap": softcap, "value_begin": value_begin}
    if alibi:
        options["alibi_slopes"] = jnp.asarray(2.0 ** -rng.uniform(0, 8, heads * group), jnp.float32)
    if prefix_lens is not None:
        options["prefix_lens"] = jnp.asarray(prefix_lens, jnp.int32)
    if images is not None:
        shifts = np.repeat(np.array(kv_lens) - np.cumsum(q_lens), q_lens)
        until = np.full(num_tokens, -1)
        for begin, end in images:
            until[begin:end] = end - 1 + shifts[begin]
        options["sees_until"] = jnp.asarray(until, jnp.int32)
    if largest:
        options["k_scale"] = jnp.asarray(rng.uniform(0.01, 0.03, heads), jnp.float32)
        options["v_scale"] = jnp.asarray(rng.uniform(0.01, 0.03, heads), jnp.float32)
    return PagedCase(
        q=normal(num_tokens, heads * group, dim),
        k=normal(num_tokens, heads, dim),
        v=normal(num_tokens, heads, value_dim) * (1 if value_begin is None else np.nan),
        pool=pool,
        page_table=jnp.asarray(table, jnp.int32),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        sinks=normal(heads * group) if sinks else None,
        options=options,
    )


def as_stored(case):
    """The new tokens' keys and values ``[T, H, D + Dv]`` as the pool keeps them, by numpy alone."""
    k, v = (np.asarray(x, np.float32) for x in (case.k, case.v))
    v = v if case.options.get("value_begin") is None else v[..., :0]
    if "k_scale" not in case.options:
        return np.asarray(jnp.asarray(np.concatenate([k, v], -1)).astype(case.pool.dtype))
    scales = (np.asarray(case.options[name], np.float32)[:, None] for name in ("k_scale", "v_scale"))
    steps = np.concatenate([x / scale for x, scale in zip((k, v), scales, strict=True)], -1)
    if case.pool.dtype != jnp.int8:
        return np.clip(steps, -448, 448).astype(case.pool.dtype)
    return np.clip(np.rint(steps), -127, 127).astype(np.int8)


def exact_pool(case):
    """The pool after the call, in the pool's own dtype."""
    pool, stored = np.array(case.pool), as_stored(case)
    page, width = pool.shape[2], stored.shape[2]
    for s, row in enumerate(np.asarray(case.page_table)):
        begin, end = int(case.cu_q_lens[s]), int(case.cu_q_lens[s + 1])
        for t in range(begin, end):
            p = int(case.kv_lens[s]) - end + t
            if 0 <= p < len(row) * page and 0 <= row[p // page] < len(pool):
                pool[row[p // page], :, p % page, :width] = stored[t]
                pool[row[p // page], :, p % page, width:] = 0
    return pool


def visible_positions(case, s, t, p, capacity):
    """Which positions of sequence `s` its query, token `t` at position `p`, sees."""
    window, prefix_lens = case.options.get("window"), case.options.get("prefix_lens")
    length = min(int(case.kv_lens[s]), capacity)
    prefix = 0 if prefix_lens is None else int(prefix_lens[s])
    until = p if "sees_until" not in case.options else max(p, int(case.options["sees_until"][t]))
    return [j for j in range(length) if j < prefix or (j <= until and (window is None or j > p - window))]


def exact_paged(case):
    """What paged_attention is to give, in float64: (out, pool)."""
    pool = exact_pool(case)
    q = np.asarray(case.q, np.float64)
    heads, page, dim = pool.shape[1], pool.shape[2], q.shape[2]
    group, value_dim = q.shape[1] // heads, case.v.shape[2]
    softcap, alibi = case.options.get("softcap"), case.options.get("alibi_slopes")
    biases = case.options.get("distance_biases")
    out = np.zeros((*q.shape[:2], value_dim))
    for s, row in enumerate(np.asarray(case.page_table)):
        begin, end = int(case.cu_q_lens[s]), int(case.cu_q_lens[s + 1])
        if begin == end:
            continue
        context = np.concatenate([pool[page_of] for page_of in np.clip(row, 0, len(pool) - 1)], axis=1)
        context = context.astype(np.float64)  # [H, positions, W]
        first = case.options.get("value_begin")
        keys, values = context[..., :dim], context[..., dim : dim + value_dim]
        if "k_scale" in case.options:
            keys = keys * np.asarray(case.options["k_scale"], np.float64)[:, None, None]
            values = values * np.asarray(case.options["v_scale"], np.float64)[:, None, None]
        if first is not None:
            values = keys[..., first : first + value_dim]
        for t in range(begin, end):
            p = int(case.kv_lens[s]) - end + t
            seen = visible_positions(case, s, t, p, len(row) * page) if p >= 0 else []
            for h in range(q.shape[1]):
                scores = keys[h // group, seen] @ q[t, h] * case.options["scale"]
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if alibi is not None:
                    scores = scores + float(alibi[h]) * (np.array(seen) - p)
                if biases is not None:
                    near = [0 <= p - j < biases.profiles.shape[1] for j in seen]
                    profiles = np.asarray(biases.profiles, np.float64)[:, np.where(near, p - np.array(seen, int), 0)]
                    scores = scores + np.where(near, np.asarray(biases.weights, np.float64)[t, h] @ profiles, 0)
                of_tokens = case.options.get("token_sinks")
                sinks = case.sinks if of_tokens is None else of_tokens[t]
                sink = None if sinks is None else float(sinks[h])
                out[t, h] = softmax(scores, sink) @ values[h // group, seen]
    return out, pool
