"""Tokens one after the other on states by row of a pool, whose channels lie on lanes.

The row of tokens is cut into blocks, which are read and written as they lie, whatever begins within them. Tokens of one
segment in one block are an item; its state, of some channels, stays in vector memory from item to item, and in
registers over an item's tokens. They are computed in tiles of 16 from an aligned token on, of which those that are no
token of the item leave the state as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model_adapters.ops.searchsorted import num_at_most
from model_adapters.ops.segments import Segments
from model_adapters.ops.tpu.page_buffers import LANES, SUBLANES, across
from model_adapters.ops.tpu.state_chunks import NO_ROW, begin_state, end_state
from model_adapters.ops.tpu.state_steps import spread

BLOCK_LEN = LANES
"""Tokens of a block: their columns of one kind are lanes of a register."""
TILE_LEN = 16
"""Tokens of a tile, which has whole registers of 16 bits."""
MAX_CHANNELS = 4096
"""Of a block, so that its tokens fit into vector memory."""
MAX_PART = 512
"""Channels whose states stay in registers: 16 numbers of each are 8 registers."""
MAX_TOKENS = 1 << 19
"""Whose blocks have a table that fits into scalar memory."""
VMEM_BYTES = 48 << 20
DTYPES = ("float32", "bfloat16")
FIELDS = ("begin", "end", "read", "write")
Columns = Callable[[int, int], jax.Array]
"""Of a kind, and a token of the tile: its numbers in all lanes of ``[N, channels]``, zeros if it does not count."""
Compute = Callable[[list[jax.Array], list[jax.Array], Columns, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""Of some channels: from vectors of a tile's tokens ``float32[16, channels]``, what all tokens share, columns, which
tokens count ``bool[16, 1]``, and a state ``[N, channels]``: results ``[16, channels]`` and the next state. Vectors that
do not count may be NaN."""


@dataclass(frozen=True)
class Channels:
    """How channels are divided.

    Attributes:
        num: All of them.
        block: Of one part of the grid.
        part: Of one computation.
        group: That share columns.
    """

    num: int
    block: int
    part: int
    group: int

    @classmethod
    def of(cls, num: int, groups: int = 1) -> Channels | None:
        """Returns the division of `num` channels in `groups`; None if none fits registers."""
        group = num // groups
        part = next((n for n in range(MAX_PART, 0, -LANES) if group % n == 0), num)
        if part > MAX_PART or (part == num and groups > 1):
            return None
        block = next(n for n in range(MAX_CHANNELS // part * part, 0, -part) if num % n == 0)
        return cls(num, block, part, group)


def unsupported_reason(num_tokens: int, num_channels: int, groups: int = 1) -> str | None:
    """Returns why tokens of some channels cannot be taken, or None."""
    if Channels.of(num_channels, groups) is None:
        if groups == 1:
            return f"{num_channels} channels; the kernel needs a multiple of {LANES}, or at most {MAX_PART}"
        return f"{groups} groups of {num_channels // groups} channels; the kernel needs a multiple of {LANES}"
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens; the kernel of scans has {MAX_TOKENS}"
    return None


def sums_over_rows(parts: Sequence[jax.Array]) -> jax.Array:
    """Returns the sums over rows of eight ``[N, channels]`` as rows of ``[8, channels]``.

    N is a multiple of 8. Halves of the rows of two are added, so that one has what is left of both, and so again.
    """
    parts = [functools.reduce(jnp.add, jnp.split(part, part.shape[0] // SUBLANES)) for part in parts]
    row = lax.broadcasted_iota(jnp.int32, parts[0].shape, 0)
    width = SUBLANES // 2
    while width:
        is_first = row // width % 2 == 0
        parts = [
            jnp.where(is_first, low + pltpu.roll(low, SUBLANES - width, 0), high + pltpu.roll(high, width, 0))
            for low, high in zip(parts[:width], parts[width:], strict=True)
        ]
        width //= 2
    return parts[0]


def _table(
    segments: Segments, read: jax.Array, write: jax.Array, left_out: jax.Array, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the first item of each block, int32[blocks + 1], and the items, int32[N * fields]."""
    last = len(segments.read) - 1
    blocks = jnp.arange(0, num_tokens + BLOCK_LEN, BLOCK_LEN, dtype=jnp.int32)
    begin = jnp.sort(jnp.concatenate([blocks[:-1], jnp.clip(segments.cu, 0, num_tokens)]))
    end = jnp.append(begin[1:], jnp.int32(num_tokens))
    segment = num_at_most(segments.cu[1:], begin)
    is_used = (end > begin) & (segment <= last) & ~left_out[jnp.minimum(segment, last)]
    segment = jnp.minimum(segment, last)
    is_first, is_last = begin == segments.cu[segment], end == segments.cu[segment + 1]
    place = begin % BLOCK_LEN
    fields = (
        place,
        place + jnp.where(is_used, end - begin, 0),
        jnp.where(is_used & is_first, read[segment], NO_ROW),
        jnp.where(is_used & is_last, write[segment], NO_ROW),
    )
    return num_at_most(begin, blocks - 1), jnp.stack(fields, axis=1).astype(jnp.int32).reshape(-1)


def _kernel(
    firsts: Any, table: Any, *refs: Any, compute: Compute, channels: Channels, num_tokens: int, num_shared: int
) -> None:
    tokens, shared, rest = refs[:num_tokens], refs[num_tokens:][:num_shared], refs[num_tokens + num_shared :]
    columns: Any = rest[0] if len(rest) > 5 else None
    spreads: Any = rest[-1]
    _, out, pool, state, states = rest if columns is None else rest[1:-1]
    width = channels.part
    begin = 0 if channels.block == channels.num else pl.multiple_of(pl.program_id(0) * channels.block, channels.block)
    block = pl.program_id(1)
    out[...] = jnp.zeros(out.shape, out.dtype)

    def spread_out(token: Any, _: None) -> None:
        for kind in range(spreads.shape[0]):
            spreads[kind, token] = spread(columns[kind], token, LANES)

    if columns is not None:
        lax.fori_loop(0, BLOCK_LEN, spread_out, None)

    def item(i: Any, _: None) -> None:
        low, high, read, write = (table[i * len(FIELDS) + n] for n in range(len(FIELDS)))
        there = (slice(None), slice(None), pl.ds(begin, channels.block))
        begin_state(read, pool.at[(jnp.maximum(read, 0), *there)], state, states)

        def one_part(n: Any, _: None) -> None:
            at = pl.ds(0, width) if width == channels.block else pl.ds(pl.multiple_of(n * width, width), width)
            group, given = (begin + n * width) // channels.group, [each[:, at] for each in shared]

            def tile(t: Any, state: jax.Array) -> jax.Array:
                first = pl.multiple_of(t * TILE_LEN, TILE_LEN)
                rows = pl.ds(first, TILE_LEN)
                token = first + lax.broadcasted_iota(jnp.int32, (TILE_LEN, 1), 0)
                used = (token >= low) & (token < high)

                def column(kind: int, number: int) -> jax.Array:
                    at_token, kind = first + number, kind * (channels.num // channels.group) + group
                    is_used = (at_token >= low) & (at_token < high)
                    return across(jnp.where(is_used, spreads[kind, at_token], 0.0), width)

                vectors = [each[rows, at].astype(jnp.float32) for each in tokens]
                made, state = compute(vectors, given, column, used, state)
                out[rows, at] = jnp.where(used, made, out[rows, at].astype(jnp.float32)).astype(out.dtype)
                return state

            state[0, :, at] = lax.fori_loop(low // TILE_LEN, pl.cdiv(high, TILE_LEN), tile, state[0, :, at])

        lax.fori_loop(0, channels.block // width, one_part, None)
        end_state(write, state, pool.at[(jnp.maximum(write, 0), *there)], states)

    lax.fori_loop(firsts[block], firsts[block + 1], item, None)


def run_scan(
    name: str,
    compute: Compute,
    tokens: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    columns: jax.Array | None,
    pool: jax.Array,
    segments: Segments,
    read: jax.Array,
    write: jax.Array,
    left_out: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Runs `compute` over the tokens of segments that are not left out.

    Args:
        name: Of the kernel.
        compute: Of some channels.
        tokens: ``[T, D]`` each.
        shared: ``float32[n, D]`` each.
        columns: ``float32[T, kinds, groups, N]`` or None.
        pool: ``float32[rows, 1, N, D]``, updated in place.
        segments: Of the T tokens.
        read: int32[R], the row that a segment begins with; `NEW` for none, `NO_ROW` if it goes on where the one before
            it ends.
        write: int32[R], the row that takes its state; `NO_ROW` for none.
        left_out: bool[R].
        dtype: Of the results.

    Returns:
        ``[T, D]``, zeros where nothing was computed, and the pool.
    """
    num_tokens, num_channels = tokens[0].shape
    channels = Channels.of(num_channels, 1 if columns is None else columns.shape[2])
    assert channels is not None
    table = _table(segments, read, write, left_out, num_tokens)
    missing = -num_tokens % (TILE_LEN if num_tokens < BLOCK_LEN else BLOCK_LEN)
    tokens = [jnp.pad(x if x.dtype in DTYPES else x.astype(jnp.float32), ((0, missing), (0, 0))) for x in tokens]
    length, rows = min(BLOCK_LEN, num_tokens + missing), pool.shape[2]

    def block_of(height: int, index: Any) -> pl.BlockSpec:
        return pl.BlockSpec((height, channels.block), index)

    specs = [
        *(block_of(length, lambda lanes, block, *_: (block, lanes)) for _ in tokens),
        *(block_of(x.shape[0], lambda lanes, block, *_: (0, lanes)) for x in shared),
    ]
    operands, scratch = [*tokens, *shared], []
    if columns is not None:
        by_kind = jnp.moveaxis(columns.reshape(num_tokens, -1, rows), 0, 2)
        operands.append(jnp.pad(by_kind, ((0, 0), (0, 0), (0, -num_tokens % BLOCK_LEN))))
        kinds = by_kind.shape[0]
        specs.append(pl.BlockSpec((kinds, rows, BLOCK_LEN), lambda lanes, block, *_: (0, 0, block)))
        scratch.append(pltpu.VMEM((kinds, BLOCK_LEN, rows, LANES), jnp.float32))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    sizes = {"num_tokens": len(tokens), "num_shared": len(shared)}
    call = pl.pallas_call(
        functools.partial(_kernel, compute=compute, channels=channels, **sizes),
        out_shape=(
            jax.ShapeDtypeStruct(tokens[0].shape, dtype if dtype in DTYPES else jnp.float32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_channels // channels.block, (num_tokens + missing) // length),
            in_specs=[*specs, anywhere],
            out_specs=(block_of(length, lambda lanes, block, *_: (block, lanes)), anywhere),
            scratch_shapes=[pltpu.VMEM((1, rows, channels.block), jnp.float32), pltpu.SemaphoreType.DMA, *scratch],
        ),
        input_output_aliases={2 + len(operands): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        name=name,
    )
    out, pool = call(*table, *operands, pool)
    return out[:num_tokens].astype(dtype), pool
