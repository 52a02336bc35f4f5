"""What tokens of a chunk give each other before any state is known, on GPUs.

All chunks of a row are computed at the same time.

A chunk's results depend on its state only by products with it. Everything else is computed here, by a program for each
chunk and head: how much each query reads of what each token adds, and, for the delta rule, the solution of the
triangular system that says what each token adds (Yang et al., 2024, section 3.3). Then `chunk_states` walks over the
chunks of a sequence, which have to wait for each other, with a few products each.

Products are those of tensor cores. A number in float32 is the sum of three in bfloat16, and a product is that of all
pairs of them but the three smallest, which are below the rounding of float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model_adapters.ops import registry
from model_adapters.ops.gpu.launch import MIN_ROWS
from model_adapters.ops.gpu.split_kv import round_up_to_power
from model_adapters.ops.gpu.state_parts import Part
from model_adapters.ops.state_pool import Chunks

KEY_COLUMNS = 64
"""Of keys that are multiplied at a time."""
NUM_TERMS = 3
"""Numbers in bfloat16 that float32 is the sum of."""
BLOCK = 16
"""Tokens that are compared one by one, where decays are by column, and rows that are inverted by substitution."""
VALUE_COLUMNS = 64
"""Of values that are solved for at a time."""


Terms = list[jax.Array]
"""Matrices in bfloat16 whose sum is one in float32, the largest first."""


def terms_of(x: jax.Array) -> Terms:
    """Returns the terms of ``x``: itself in bfloat16, three of another dtype.

    A term is the upper half of the bits of what is left, which takes no conversion.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    found, x = [], x.astype(jnp.float32)
    for _ in range(NUM_TERMS):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        found.append(lax.bitcast_convert_type((bits >> 16).astype(jnp.int16), jnp.bfloat16))
        x = x - lax.bitcast_convert_type(bits & -(1 << 16), jnp.float32)
    return found


def times(x: jax.Array | Terms, y: jax.Array | Terms, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns the product of two float32 matrices over an axis of each.

    It is six of bfloat16, the smallest first. Interpreted, bfloat16 is multiplied as float32, which gives the same.
    """
    over = (((contract[0],), (contract[1],)), ((), ()))
    dtype, precision = (jnp.bfloat16, None) if registry.platform() == "gpu" else (jnp.float32, lax.Precision.HIGHEST)
    ours, others = (
        [term.astype(dtype) for term in (matrix if isinstance(matrix, list) else terms_of(matrix))] for matrix in (x, y)
    )
    products = [
        lax.dot_general(ours[i], others[n - i], over, precision=precision, preferred_element_type=jnp.float32)
        for n in range(NUM_TERMS - 1, -1, -1)
        for i in range(n + 1)
        if i < len(ours) and n - i < len(others)
    ]
    return functools.reduce(jnp.add, products)


@dataclass(frozen=True)
class ChunkOperands:
    """What chunks are computed of; H heads are groups of those of keys.

    Attributes:
        q: ``[T, Hk, K]``, what reads a state.
        k: ``[T, Hk, K]``, where a value is added.
        v: ``[T, H, V]``, values.
        g: ``float32[T, H]`` or ``float32[T, H, K]``, logarithms of decays.
        factor: ``[T, H]``, of each value.
        skip: ``float32[T, H]``, of a value in the result, or None.
        is_delta: Whether what a state has of a key is taken off its value.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    factor: jax.Array
    skip: jax.Array | None = None
    is_delta: bool = False

    def num_key_parts(self, most: int = KEY_COLUMNS) -> int:
        """Returns how many parts of at most so many columns keys have."""
        return pl.cdiv(self.k.shape[2], min(most, self._padded))

    def key_part(self, index: Any, most: int = KEY_COLUMNS) -> Part:
        """Returns one of these parts."""
        size = min(most, self._padded)
        return Part.of(index * size, size, self.k.shape[2])

    @property
    def _padded(self) -> int:
        return max(MIN_ROWS, round_up_to_power(self.k.shape[2]))


@dataclass(frozen=True)
class Tokens:
    """The tokens of a chunk for one head, and how they are read.

    Attributes:
        token: int32[C].
        mask: bool[C], which of them there are.
        head: Of the states.
        heads: Heads of the states.
    """

    token: jax.Array
    mask: jax.Array
    head: Any
    heads: int

    def numbers(self, ref: Any) -> jax.Array:
        """Reads ``float32[C]`` of ``[T, H]``, zeros where no token is."""
        at = ref.at[self.token, self.head]
        return plgpu.load(at, mask=self.mask, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)

    def _read(self, ref: Any, part: Part, *first: int) -> jax.Array:
        head = self.head // (self.heads // ref.shape[-2])
        at = ref.at[*first, self.token[:, None], head, part.index[None]]
        mask = self.mask[:, None] & part.mask[None]
        return plgpu.load(at, mask=mask, other=jnp.zeros((), ref.dtype))

    def vectors(self, ref: Any, part: Part) -> jax.Array:
        """Reads ``float32[C, n]`` of ``[T, heads, width]``, zeros where nothing is."""
        return self._read(ref, part).astype(jnp.float32)

    def terms(self, ref: Any, part: Part) -> Terms:
        """Reads terms ``[C, n]`` of ``[T, heads, width]`` or of an array of terms."""
        if len(ref.shape) == 3:
            return terms_of(self._read(ref, part))
        return [self._read(ref, part, i) for i in range(ref.shape[0])]

    def write(self, ref: Any, part: Part, values: jax.Array) -> None:
        """Writes ``values[C, n]`` to ``[T, H, width]`` or to an array of terms."""
        at, mask = (self.token[:, None], self.head, part.index[None]), self.mask[:, None] & part.mask[None]
        if len(ref.shape) == 3:
            plgpu.store(ref.at[at], values.astype(ref.dtype), mask=mask)
            return
        for i, term in enumerate(terms_of(values)):
            plgpu.store(ref.at[i, *at], term, mask=mask)

    def write_numbers(self, ref: Any, values: jax.Array) -> None:
        """Writes ``values[C]`` to ``[T, H]``."""
        plgpu.store(ref.at[self.token, self.head], values.astype(ref.dtype), mask=self.mask)

    def before(self, distance: Any, mask: jax.Array) -> Tokens:
        """Returns the tokens `distance` in front of these, where ``mask[C]`` says so."""
        mask = self.mask & mask
        return Tokens(jnp.where(mask, self.token - distance, 0), mask, self.head, self.heads)


def _is_between_halves(size: int, width: int) -> jax.Array:
    """Returns where rows are in the second and columns in the first half of a block.

    Halves have `width`. Rows and columns are compared as vectors: matrices of both would take registers.
    """
    half = lax.iota(jnp.int32, size) // width
    return half[None] == jnp.where(half % 2 == 1, half - 1, -1)[:, None]


def _sums_behind(g: jax.Array, size: int) -> jax.Array:
    """Returns sums of ``g[C, n]`` over the tokens behind each, to a multiple of `size`.

    A difference of two sums from the beginning would lose the digits of a small one behind a large one.
    """
    place = lax.iota(jnp.int32, g.shape[0])
    is_behind = (place[None] > place[:, None]) & (place[None] < ((place // size + 1) * size)[:, None])
    return times([jnp.where(is_behind, 1.0, 0.0).astype(jnp.bfloat16)], g)


def _decays_between(g: jax.Array) -> jax.Array:
    """Returns what is left at each token of earlier ones, ``[C, C]`` of ``g[C]``."""
    row, column = (lax.broadcasted_iota(jnp.int32, (g.shape[0], g.shape[0]), axis) for axis in (0, 1))
    sums = jnp.cumsum(jnp.where(row > column, g[:, None], 0.0), axis=0)  # over the tokens behind `column` until `row`
    return jnp.where(row >= column, jnp.exp(sums), 0.0)


def _pairs_by_column(x: jax.Array, read: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Returns rows of x times the keys up to each, decayed by column, ``[C, C]``.

    The decay between two tokens differs by column, so it is no factor of a product. It is one of both operands: a token
    has decayed from the last token of a half of a block on, a key until there. Both factors are at most 1, which those
    from the beginning of a chunk on would not be. So halves of 32 and 16 tokens give each other what one product each
    has. Tokens of the same 16 are compared one by one, by distance: the decay from token i - d until i, in each column,
    is that for d - 1 times that of token i - d + 1.

    Args:
        x: ``float32[C, n]``, some columns.
        read: Reads keys and logarithms of decays ``[C, n]`` of the tokens a distance in front, where ``mask[C]`` says.
    """
    size, dim = x.shape
    made = jnp.zeros((size, size), jnp.float32)
    keys, g = read(0, jnp.ones(size, jnp.bool_))
    width = size // 2
    while width >= BLOCK:
        until = jnp.exp(jnp.cumsum(g.reshape(-1, width, dim), axis=1)).reshape(size, dim)
        since = jnp.exp(_sums_behind(g, width))
        made = made + jnp.where(_is_between_halves(size, width), times(x * until, keys * since, (1, 1)), 0.0)
        width //= 2
    place = lax.iota(jnp.int32, size)

    def at_distance(distance: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        decay, made = carry
        is_inside = place % BLOCK >= distance
        keys, _ = read(distance, is_inside)
        _, g = read(distance - 1, is_inside & (distance > 0))
        decay = decay + g
        sums = jnp.sum(x * keys * jnp.exp(decay), axis=1)
        return decay, jnp.where(place[None] == jnp.where(is_inside, place - distance, -1)[:, None], sums[:, None], made)

    return lax.fori_loop(0, BLOCK, at_distance, (jnp.zeros((size, dim), jnp.float32), made))[1]


def inverse(system: jax.Array) -> jax.Array:
    """Returns the inverse of ``1 + system[C, C]``, which is 0 on and above its diagonal.

    Blocks of 16 on the diagonal are inverted by forward substitution, all at once: step j takes row j, which is final,
    out of the rows behind it. Two blocks and the matrix L between them then give ``T - T L T`` of the inverses T that
    were found, and so do two of those.
    """
    size = system.shape[0]
    num = size // BLOCK
    of_block = (size, num, BLOCK)
    is_own = lax.broadcasted_iota(jnp.int32, of_block, 0) // BLOCK == lax.broadcasted_iota(jnp.int32, of_block, 1)
    blocks = jnp.sum(jnp.where(is_own, system.reshape(of_block), 0.0), axis=1).reshape(num, BLOCK, BLOCK)
    row, column = (lax.broadcasted_iota(jnp.int32, blocks.shape, axis) for axis in (1, 2))

    def without(j: Any, x: jax.Array) -> jax.Array:
        factor = jnp.sum(jnp.where(column == j, blocks, 0.0), axis=2, keepdims=True)
        return x - factor * jnp.sum(jnp.where(row == j, x, 0.0), axis=1, keepdims=True)

    found = lax.fori_loop(0, BLOCK - 1, without, jnp.where(row == column, 1.0, 0.0))
    found = jnp.where(is_own, found.reshape(size, 1, BLOCK), 0.0).reshape(size, size)
    width = BLOCK
    while width < size:
        between = jnp.where(_is_between_halves(size, width), system, 0.0)
        found = found - times(found, times(between, found))
        width *= 2
    return found


def _pairs(operands: ChunkOperands, tokens: Tokens, of_keys: Any, refs: Sequence[Any]) -> jax.Array:
    """Returns what queries, or keys if `of_keys` is 1, read of what tokens add."""
    q, k, g = refs
    size, by_head = tokens.token.shape[0], len(g.shape) == 2
    most = KEY_COLUMNS if by_head else KEY_COLUMNS // 4

    def of_part(index: Any, made: jax.Array) -> jax.Array:
        part = operands.key_part(index, most)

        def read(distance: Any, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
            before = tokens.before(distance, mask)
            return before.vectors(k, part), before.vectors(g, part)

        if not operands.is_delta:
            return made + times(tokens.terms(q, part), tokens.terms(k, part), (1, 1))
        x = jnp.where(of_keys == 1, tokens.vectors(k, part), tokens.vectors(q, part))
        return made + (times(x, tokens.vectors(k, part), (1, 1)) if by_head else _pairs_by_column(x, read))

    made: jax.Array = lax.fori_loop(0, operands.num_key_parts(most), of_part, jnp.zeros((size, size), jnp.float32))
    return made * _decays_between(tokens.numbers(g)) if by_head else made


class Pairs(NamedTuple):
    """What is known of chunks without their states; nothing of tokens without a chunk.

    Attributes:
        within: ``bfloat16[terms, T, H, C]``, how much each query reads of what each token of its chunk adds.
        over_chunk: ``float32[N, H, K or 1]``, the decay over each chunk.
        until: Decays from the beginning of a chunk until each token, ``float32[T, H]``; those by column with the query,
            which is multiplied with them here, ``bfloat16[terms, T, H, K]``.
        since: Decays behind each token until the end of a chunk, those by column with the key.
        known: ``bfloat16[terms, T, H, K]`` or None. Each token adds `values` less the product of this and the state
            that its chunk begins with.
        values: ``float32[T, H, V]`` or None.
    """

    within: jax.Array
    over_chunk: jax.Array
    until: jax.Array
    since: jax.Array
    known: jax.Array | None = None
    values: jax.Array | None = None


def _write_decays(
    operands: ChunkOperands, chunk: Any, tokens: Tokens, refs: Sequence[Any], outs: Sequence[Any]
) -> None:
    """Writes the decays of a chunk, those by column with what they multiply."""
    q, k, g = refs
    over_chunk, until, since = outs
    size = tokens.token.shape[0]
    if len(g.shape) == 2:
        decays = tokens.numbers(g)
        over_chunk[chunk, tokens.head, 0] = jnp.exp(jnp.sum(decays))
        tokens.write_numbers(until, jnp.exp(jnp.cumsum(decays)))
        row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
        tokens.write_numbers(since, jnp.exp(jnp.sum(jnp.where(row > column, decays[:, None], 0.0), axis=0)))
        return

    def of_part(index: Any, _: None) -> None:
        part = operands.key_part(index, KEY_COLUMNS // 2)
        decays = tokens.vectors(g, part)
        plgpu.store(over_chunk.at[chunk, tokens.head, part.index], jnp.exp(jnp.sum(decays, axis=0)), mask=part.mask)
        tokens.write(until, part, tokens.vectors(q, part) * jnp.exp(jnp.cumsum(decays, axis=0)))
        tokens.write(since, part, tokens.vectors(k, part) * jnp.exp(_sums_behind(decays, size)))

    lax.fori_loop(0, operands.num_key_parts(KEY_COLUMNS // 2), of_part, None)


def _solve(operands: ChunkOperands, tokens: Tokens, refs: Sequence[Any], outs: Sequence[Any]) -> None:
    """Writes the solutions of a chunk's system for its keys and values."""
    system, k, g, factor, v = refs
    known, values = outs
    factors, size = tokens.numbers(factor)[:, None], tokens.token.shape[0]
    solution = terms_of(inverse(tokens.vectors(system, Part.of(0, size, size))))

    def of_keys(index: Any, _: None) -> None:
        part = operands.key_part(index)
        decays = tokens.numbers(g)[:, None] if len(g.shape) == 2 else tokens.vectors(g, part)
        until = jnp.exp(jnp.cumsum(decays, axis=0))
        tokens.write(known, part, times(solution, tokens.vectors(k, part) * (until * factors)))

    def of_values(index: Any, _: None) -> None:
        part = Part.of(index * VALUE_COLUMNS, VALUE_COLUMNS, v.shape[2])
        tokens.write(values, part, times(solution, tokens.vectors(v, part) * factors))

    lax.fori_loop(0, operands.num_key_parts(), of_keys, None)
    lax.fori_loop(0, pl.cdiv(v.shape[2], VALUE_COLUMNS), of_values, None)


def _run(
    name: str,
    compute: Callable[[tuple[Any, Any], Tokens, Sequence[Any]], None],
    operands: ChunkOperands,
    arrays: Sequence[jax.Array],
    shapes: Sequence[jax.ShapeDtypeStruct],
    chunks: Chunks,
    size: int,
    num: int,
) -> list[jax.Array]:
    """Runs `num` programs on each chunk and head of the states.

    `compute` gets the numbers of the chunk and the program, the chunk's tokens, and references.
    """
    heads, num_chunks = operands.v.shape[1], len(chunks.begin)
    lens = jnp.where(jnp.arange(num_chunks) < chunks.num, chunks.lens, 0)

    def body(begins: Any, lens: Any, *refs: Any) -> None:
        chunk, head, number = (pl.program_id(axis) for axis in range(3))
        length, place = lens[chunk], lax.iota(jnp.int32, size)
        tokens = Tokens(begins[chunk] + place, place < length, head, heads)
        pl.when(length > 0)(lambda: compute((chunk, number), tokens, refs))

    numbers = operands.v.shape[0] * heads * (operands.k.shape[2] + operands.v.shape[2])
    made: list[jax.Array] = pl.pallas_call(
        body,
        out_shape=shapes,
        grid=(num_chunks, heads, num),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=4 * size * numbers, transcendentals=operands.v.shape[0] * heads * size, bytes_accessed=12 * numbers
        ),
        interpret=registry.platform() != "gpu",
        name=name,
    )(chunks.begin, lens, *arrays)
    return made


def pairs_of(name: str, operands: ChunkOperands, chunks: Chunks, size: int) -> Pairs:
    """Returns what is computed of chunks of at most `size` tokens without states."""
    num_tokens, heads, width = operands.v.shape
    dim, by_head, is_delta = operands.k.shape[2], operands.g.ndim == 2, operands.is_delta

    def in_terms(width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((NUM_TERMS, num_tokens, heads, width), jnp.bfloat16)

    def in_float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    over_chunk = in_float32(len(chunks.begin), heads, 1 if by_head else dim)
    decays = in_float32(num_tokens, heads) if by_head else in_terms(dim)
    all_decays = [over_chunk, decays, decays]

    def of_pairs(numbers: tuple[Any, Any], tokens: Tokens, refs: Sequence[Any]) -> None:
        (chunk, of_keys), part = numbers, Part.of(0, size, size)
        q, k, g, factor, within, *outs = refs
        made = _pairs(operands, tokens, of_keys, (q, k, g))
        pl.when(of_keys == 0)(lambda: tokens.write(within, part, made))
        if not is_delta:
            _write_decays(operands, chunk, tokens, (q, k, g), outs)
            return

        @pl.when(of_keys == 1)
        def _keys() -> None:
            row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
            tokens.write(outs[0], part, jnp.where(row > column, made * tokens.numbers(factor)[:, None], 0.0))

    arrays = [operands.q, operands.k, operands.g, operands.factor]
    shapes = [in_terms(size), *([in_float32(num_tokens, heads, size)] if is_delta else all_decays)]
    within, *found = _run(f"{name}_pairs", of_pairs, operands, arrays, shapes, chunks, size, 1 + is_delta)
    if not is_delta:
        return Pairs(within, *found)

    def of_solution(numbers: tuple[Any, Any], tokens: Tokens, refs: Sequence[Any]) -> None:
        system, v, q, k, g, factor, *outs = refs
        _write_decays(operands, numbers[0], tokens, (q, k, g), outs[:3])
        _solve(operands, tokens, (system, k, g, factor, v), outs[3:])

    arrays = [*found, operands.v, *arrays]
    shapes = [*all_decays, in_terms(dim), in_float32(num_tokens, heads, width)]
    return Pairs(within, *_run(f"{name}_solve", of_solution, operands, arrays, shapes, chunks, size, 1))
