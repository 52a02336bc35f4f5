"""Checks every implementation of every op against its reference; memory bandwidth.

The reference is computed on the CPU in float32 from the same inputs, whatever the device under test is.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters import ops
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import compressed_weight, registry
from torchax_serve.diagnostics.report import Fact

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest ``|kernel - reference| / (|reference| + rms)`` by dtype; rounding causes up to 5e-6 and 1.5e-2."""
_ON_A_MESH = "sharded"  # name of the implementations that need several devices
_ROUNDS = 5  # repetitions of a timing, of which the fastest counts


@dataclass(frozen=True)
class KernelCase:
    """A call of an op.

    Attributes:
        call: The op with its static arguments.
        args: Arrays of the call, floats in the dtype under test.
        read_bytes: Fewest bytes that the call reads; None if reads do not bound its speed.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    read_bytes: int | None = field(default=None)


def _untraced(case: KernelCase) -> Callable[..., Any]:
    """Returns the call as a new function: JAX caches traces, with their kernels, by function."""
    return lambda *args: case.call(*args)


def _normal(dtype: Any, *shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * scale
    return jnp.asarray(values, dtype)


def _activation(dtype: Any, size: int) -> KernelCase:
    return KernelCase(ops.silu, (_normal(dtype, 16, 512 * size),))


def _linear(dtype: Any, size: int) -> KernelCase:
    wide = 512 * size
    weight = _normal(dtype, wide, wide, seed=1, scale=wide**-0.5)
    return KernelCase(ops.linear, (_normal(dtype, 4, wide), weight), weight.nbytes)


def _lora(dtype: Any, size: int) -> KernelCase:
    wide, rank = 128 * size, 8
    ids = jnp.asarray([0, 2, 1, 1, 3, 0], jnp.int32)  # rows without an adapter among others
    a = _normal(dtype, 3, rank, wide, seed=2, scale=wide**-0.5)
    b = _normal(dtype, 3, rank, wide, seed=3, scale=rank**-0.5)
    x, sums = (_normal(dtype, len(ids), wide, seed=seed) for seed in range(2))
    return KernelCase(partial(registry.call, "lora"), (x, sums, ids, a, b))


def _rms_norm(dtype: Any, size: int) -> KernelCase:
    call = partial(ops.rms_norm, eps=1e-6, rounds_first=False)
    return KernelCase(call, (_normal(dtype, 16, 512 * size), _normal(dtype, 512 * size, seed=1)))


def _row_sum(dtype: Any, size: int) -> KernelCase:
    return KernelCase(ops.row_sum, (_normal(dtype, 16, 512 * size),))


def _grouped_matmul(dtype: Any, size: int) -> KernelCase:
    wide, sizes = 128 * size, (3, 0, 9, 4)
    weight = _normal(dtype, len(sizes), wide, wide, seed=1, scale=wide**-0.5)
    groups = jnp.asarray(sizes, jnp.int32)
    return KernelCase(partial(ops.grouped_matmul, layout="enk"), (_normal(dtype, sum(sizes), wide), weight, groups))


def _routed_matmul(dtype: Any, size: int) -> KernelCase:
    wide, num_matrices = 128 * size, 4
    weight = _normal(dtype, num_matrices, wide, wide, seed=1, scale=wide**-0.5)
    ids = jnp.asarray(np.random.default_rng(4).integers(0, num_matrices, (9, 2)), jnp.int32)
    return KernelCase(ops.routed_matmul, (_normal(dtype, 9, wide), weight, ids))


def _dense_attention(dtype: Any, size: int) -> KernelCase:
    shape = (1, 2, 256 * size, 64)  # long enough for a second block of queries where `size` is 4
    call = partial(ops.dense_attention, mask=None, args=ops.AttentionArgs(0.125), causal=True)
    return KernelCase(call, tuple(_normal(dtype, *shape, seed=seed) for seed in range(3)))


_HEADS, _GROUP, _DIM, _PAGE = 2, 4, 128, 64


def _pages(dtype: Any, num_rows: int, row_len: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a pool of sequences on shuffled pages, its page table and their lengths."""
    pages_per_row = -(-row_len // _PAGE)
    order = np.random.default_rng(5).permutation(num_rows * pages_per_row)
    table = jnp.asarray(1 + order.reshape(num_rows, pages_per_row), jnp.int32)
    pool = _normal(dtype, 1 + order.size, _HEADS, _PAGE, 2 * _DIM, seed=3)
    return pool, table, jnp.full(num_rows, row_len, jnp.int32)


def _tokens(dtype: Any, number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    heads = (_HEADS * _GROUP, _HEADS, _HEADS)
    q, k, v = (_normal(dtype, number, heads[i], _DIM, seed=i) for i in range(3))
    return q, k, v


def _decode_attention(dtype: Any, size: int) -> KernelCase:
    num_rows = 4 * size
    pool, table, lens = _pages(dtype, num_rows, 128 * size)
    starts = jnp.zeros_like(lens)
    call = partial(ops.decode_attention, args=ops.AttentionArgs(_DIM**-0.5))
    return KernelCase(call, (*_tokens(dtype, num_rows), pool, table, lens, starts), pool.nbytes)


def _cross_attention(dtype: Any, size: int) -> KernelCase:
    num_rows = 4 * size
    pool, table, lens = _pages(dtype, num_rows, 128 * size)
    q, _, _ = _tokens(dtype, num_rows)
    call = partial(ops.cross_attention, args=ops.AttentionArgs(_DIM**-0.5))
    return KernelCase(call, (q, pool[..., :_DIM], pool[..., _DIM:], table, lens), pool.nbytes)


def _paged_attention(dtype: Any, size: int) -> KernelCase:
    new = (1, 20, 1, 10)
    pool, table, lens = _pages(dtype, len(new), 64 * size)
    ends = jnp.asarray([0, *np.cumsum(new)], jnp.int32)
    call = partial(ops.paged_attention, args=ops.AttentionArgs(_DIM**-0.5))
    return KernelCase(call, (*_tokens(dtype, sum(new)), pool, table, lens, ends))


def _varlen_attention(dtype: Any, size: int) -> KernelCase:
    lens = (1, 20 * size, 3, 10)
    q, k, v = _tokens(dtype, sum(lens))
    ends = jnp.asarray([0, *np.cumsum(lens)], jnp.int32)
    until = jnp.asarray(np.repeat(lens, lens) - 1, jnp.int32)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array, until: jax.Array) -> jax.Array:
        args = ops.AttentionArgs(_DIM**-0.5, sees_until=until)
        return ops.varlen_attention(q, jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1), ends, args)

    return KernelCase(call, (q, k, v, ends, until))


_LENS = (1, 40, 1, 10)
"""Tokens of the sequences that recurrent layers get: prompts and single tokens."""


def _recurrent(op: Callable[..., Any], pool: jax.Array, *operands: jax.Array | None, **options: Any) -> KernelCase:
    """Returns a call of `op` on states of which all but the first sequence's hold something."""
    ends = jnp.asarray([0, *np.cumsum(_LENS)], jnp.int32)
    slots = jnp.arange(len(_LENS), dtype=jnp.int32)
    segments = ops.Segments.of(ends, slots, slots > 0)
    missing = [number for number, each in enumerate(operands) if each is None]

    def call(pool: jax.Array, *given: jax.Array) -> Any:
        arguments: list[Any] = list(given)
        for number in missing:
            arguments.insert(number, None)
        out, pool = op(*arguments, pool, segments, **options)
        return out, pool[:-1]  # what is dropped lies in the last row, or nowhere

    return KernelCase(call, (pool, *(each for each in operands if each is not None)))


def _causal_convolution(dtype: Any, size: int) -> KernelCase:
    width, taps = 128 * size, 4
    pool = _normal(dtype, len(_LENS) + 1, taps - 1, width, seed=2)
    x, weight = _normal(dtype, sum(_LENS), width), _normal(dtype, width, taps, seed=1)
    return _recurrent(ops.causal_convolution, pool, x, weight, None)


def _gated_delta_rule(dtype: Any, size: int) -> KernelCase:
    heads, dim, tokens = 2 * size, 32, sum(_LENS)
    pool = _normal(jnp.float32, len(_LENS) + 1, heads, dim, dim, seed=5)
    q, k, v = (_normal(dtype, tokens, heads, dim, seed=seed) for seed in range(3))
    decays = -jnp.abs(_normal(jnp.float32, tokens, heads, seed=3))
    beta = jax.nn.sigmoid(_normal(dtype, tokens, heads, seed=4))
    return _recurrent(ops.gated_delta_rule, pool, q, k, v, decays, beta, is_normed=True)


def _state_space(dtype: Any, size: int) -> KernelCase:
    heads, dim, tokens = 4 * size, 16, sum(_LENS)
    pool = _normal(jnp.float32, len(_LENS) + 1, heads, dim, 32, seed=5)
    x, dt = _normal(dtype, tokens, heads, dim), _normal(dtype, tokens, heads, seed=1)
    b, c = (_normal(dtype, tokens, 2, 32, seed=seed) for seed in (2, 3))
    return _recurrent(ops.state_space, pool, x, dt, -jnp.ones(heads), b, c, jnp.ones(heads), None)


def _selective_scan(dtype: Any, size: int) -> KernelCase:
    width, tokens = 64 * size, sum(_LENS)
    pool = _normal(jnp.float32, len(_LENS) + 1, width, 16, seed=5)
    x, dt = _normal(dtype, tokens, width), jnp.abs(_normal(dtype, tokens, width, seed=1))
    b, c = (_normal(dtype, tokens, 16, seed=seed) for seed in (2, 3))
    return _recurrent(ops.selective_scan, pool, x, dt, -jnp.ones((width, 16)), b, c, None)


def _linear_recurrence(dtype: Any, size: int) -> KernelCase:
    width, tokens = 64 * size, sum(_LENS)
    pool = _normal(jnp.float32, len(_LENS) + 1, width, seed=5)
    gates = jax.nn.sigmoid(_normal(dtype, tokens, width, seed=1))
    return _recurrent(ops.linear_recurrence, pool, gates, _normal(dtype, tokens, width))


CASES: dict[str, Callable[[Any, int], KernelCase]] = {
    "activation": _activation,
    "causal_convolution": _causal_convolution,
    "cross_attention": _cross_attention,
    "decode_attention": _decode_attention,
    "dense_attention": _dense_attention,
    "gated_delta_rule": _gated_delta_rule,
    "grouped_matmul": _grouped_matmul,
    "linear": _linear,
    "linear_recurrence": _linear_recurrence,
    "lora": _lora,
    "paged_attention": _paged_attention,
    "rms_norm": _rms_norm,
    "routed_matmul": _routed_matmul,
    "row_sum": _row_sum,
    "selective_scan": _selective_scan,
    "state_space": _state_space,
    "varlen_attention": _varlen_attention,
}
"""Makes a call of each op in a dtype; the second argument scales the arrays (1 is small)."""


def kernels_in_use() -> Iterator[Fact]:
    """Yields the implementation of each op in bfloat16 and float32, and why no faster one."""
    for op in ops.list_ops():
        chosen, reasons = {}, []
        for dtype in ("bfloat16", "float32"):
            case = CASES[op.name](dtype, 1)
            with registry.record_calls() as record, registry.fallbacks() as fallbacks:
                jax.eval_shape(_untraced(case), *case.args)
            chosen[dtype] = next((name for each, name in sorted(record) if each == op.name), "unknown")
            reasons += fallbacks
        names = " and ".join(sorted(set(chosen.values())))
        if len(set(chosen.values())) > 1:
            names = ", ".join(f"{name} in {dtype}" for dtype, name in chosen.items())
        why = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
        # A missing kernel of the platform costs speed; an implementation for other shapes does not.
        is_slower = any(f"{op.name}, {registry.platform()}-" in reason for reason in reasons)
        yield Fact(op.name, names + why, "note" if is_slower else "ok")


def numerics(note: Callable[[str], None], *, size: int = 4) -> Iterator[Fact]:
    """Yields the largest difference from the reference of each implementation.

    One beyond `TOLERANCE` is a problem.
    """
    for op in ops.list_ops():
        expected_of = functools.cache(partial(_expected, op.name, size=size))  # compiled once, and then let go
        for implementation in op.implementations:
            if registry.platform() not in implementation.platforms or implementation.name == _ON_A_MESH:
                continue
            note(f"computing {op.name} by {implementation.name}")
            yield _compared(op.name, implementation.name, size, expected_of)


def _compared(op: str, implementation: str, size: int, expected_of: Callable[[str], Any]) -> Fact:
    differences, unsupported = {}, []
    for dtype, tolerance in TOLERANCE.items():
        case = CASES[op](dtype, size)
        if implementation == "cpu-packed":
            case = _packed(case, dtype)
        try:
            reason = _unsupported_reason(op, implementation, case)
            if reason is not None:
                unsupported.append(f"{dtype}: {reason}")
                continue
            with registry.use(op, implementation):
                got = jax.jit(_untraced(case))(*case.args)
            differences[dtype] = (largest_difference(got, expected_of(dtype)), tolerance)
        except Exception as error:  # reports whatever a compiler raises
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return Fact(f"{op}, {implementation}", f"{dtype} fails with {reason}", "problem")
    said = [f"{dtype} {largest:.1e}" for dtype, (largest, _) in differences.items()]
    beyond = [dtype for dtype, (largest, tolerance) in differences.items() if not largest <= tolerance]
    text = ", ".join([*said, *(f"not for {each}" for each in unsupported)])
    if beyond:
        allowed = ", ".join(f"{dtype} {TOLERANCE[dtype]:g}" for dtype in beyond)
        return Fact(f"{op}, {implementation}", f"{text}; expected at most {allowed}", "problem")
    return Fact(f"{op}, {implementation}", text)


def _packed(case: KernelCase, dtype: str) -> KernelCase:
    """Returns `case` of a product with its weight compressed, or `case` if unsupported."""
    x, weight, *others = case.args
    packed = compressed_weight.compress_weight(weight) if dtype == "bfloat16" else None
    if packed is None:
        return case

    def call(x: jax.Array, held: compressed_weight.CompressedWeight, *others: jax.Array) -> jax.Array:
        with compressed_weight.substituted({"weight": held}) as unpacked:
            out: jax.Array = case.call(x, unpacked["weight"], *others)
            return out

    return KernelCase(call, (x, packed, *others))


def _unsupported_reason(op: str, implementation: str, case: KernelCase) -> str | None:
    """Returns why `implementation` does not support the call, or None."""
    try:
        with registry.use(op, implementation):
            jax.eval_shape(_untraced(case), *case.args)
    except InvalidArgumentError as error:
        return str(error).partition("cannot serve: ")[2].rpartition("; drop")[0] or str(error)
    return None


def _expected(name: str, dtype: str, size: int) -> Any:
    """Returns the result of a case in float32 on the CPU, with references for all ops."""
    case = CASES[name](dtype, size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(jax.devices("cpu")[0]))
        stack.enter_context(registry.on_platform("cpu"))
        for op in ops.list_ops():
            stack.enter_context(registry.use(op.name, registry.REFERENCE))
        return jax.jit(_untraced(case))(*map(_wide, case.args))


def _wide(array: jax.Array) -> jax.Array:
    host = np.asarray(array)
    return jnp.asarray(host.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) else host)


def largest_difference(got: Any, expected: Any) -> float:
    """Returns the largest ``|got - expected| / (|expected| + rms)``, nan if a result is nan."""
    largest = 0.0
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        scale = np.sqrt(np.mean(other**2)) or 1.0
        largest = float(np.maximum(largest, np.max(np.abs(one - other) / (np.abs(other) + scale), initial=0.0)))
    return largest


def bandwidth(note: Callable[[str], None], *, buffer_bytes: int | None = None) -> Iterator[Fact]:
    """Yields the memory bandwidth and how much of it bandwidth-bound kernels reach."""
    from torchax_serve.profiling.bandwidth import measure_bandwidth

    note("reading memory")
    best = measure_bandwidth(buffer_bytes)
    yield Fact("memory", f"{best.bytes_per_s / 1e9:.1f} GB/s reading {best.buffer_bytes / 1e6:.0f} MB ({best.method})")
    size = 8 if registry.platform() == "cpu" else 32
    for op in ("linear", "decode_attention"):
        note(f"timing {op}")
        case = CASES[op]("bfloat16", size)
        assert case.read_bytes is not None
        with registry.record_calls() as record:
            run = jax.jit(_untraced(case))
            rate = case.read_bytes / _fastest_s(run, case.args)
        name = next((name for each, name in sorted(record) if each == op), "reference")
        amount = f"{case.read_bytes / 1e6:.0f} MB in bfloat16"
        yield Fact(f"{op}, {name}", f"{rate / 1e9:.1f} GB/s, {rate / best.bytes_per_s:.0%} of it ({amount})")


def _fastest_s(run: Callable[..., Any], args: tuple[Any, ...]) -> float:
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return min(times)
