"""The gathered road: models that cannot be packed, because they count positions by themselves, attend past
transformers' interface, or keep a recurrent state.

Every request is a forward of its own (`RowForward`). Its pages are gathered into dense keys and values first, and what
the forward adds to them is scattered back; a state is taken from its slot and put there again. All decode rows of about
one length are one program, a chunk of a prompt is another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.arrays import from_host
from torchax_serve.buckets import ladder, rung
from torchax_serve.engine.gathered_cache import GatheredCache, gather, scatter
from torchax_serve.engine.gathered_rows import LONGEST, Leaves, RowForward, StateLayout
from torchax_serve.engine.packed import ON_DEVICE
from torchax_serve.program_cache import KeptFunction, ProgramCache
from torchax_serve.scheduling import PlanRow

Kind = Literal["decode", "begin", "extend"]
SMALLEST_GATHER_LEN = 256
MAX_GATHERED_LEN = 1 << 16
"""Tokens that a decode program gathers, all rows together, where it has more than one row: it bounds what a step takes
beside the cache."""


@dataclasses.dataclass(frozen=True)
class GatheredSpec:
    """The static part of a gathered step."""

    kind: Kind
    num_tokens: int  # T, of each row
    num_rows: int  # S, more than 1 in a decode step only
    num_pages: int  # of each row; 0 where nothing is kept in pages
    block_len: int  # tokens of one forward
    all_logits: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of a step's one array of integers, in order."""
        rows = self.num_rows
        return (rows * self.num_tokens, rows, rows, rows, rows * self.num_pages)

    @property
    def how(self) -> dict[str, Any]:
        """How a chunk is computed."""
        return {"block_len": self.block_len, "all_logits": self.all_logits}


class _Numbers(NamedTuple):
    """What `GatheredSpec.sizes` cuts an array into."""

    ids: Any  # int32[S * T]
    slots: Any  # int32[S]; num_slots for padding
    starts: Any  # int32[S], tokens in the cache
    lens: Any  # int32[S], new tokens that are no padding
    tables: Any  # int32[S * num_pages]


class _Job(NamedTuple):
    """A program's share of a step."""

    spec: GatheredSpec
    rows: list[PlanRow]
    places: list[int]  # where its logits go, of its rows or tokens


class GatheredModel:
    """Runs the rows of a plan, decode rows and at most one chunk of a prompt, on a `GatheredCache`.

    Args:
        forward: of one request.
        weights: by name.
        cache: pools and states, replaced by each step.
        programs: where compiled steps are kept.
        num_slots: most rows of a step.
        chunk_sizes: lengths that a chunk of a prompt may have, descending.
        is_exact: whether a chunk has one of these lengths; else it is padded to the next.
        block_len: tokens of a chunk that are one forward; longer ones, which are exact, take several.
    """

    def __init__(
        self,
        forward: RowForward,
        weights: Mapping[str, jax.Array],
        cache: GatheredCache,
        programs: ProgramCache,
        layout: StateLayout,
        *,
        num_slots: int,
        chunk_sizes: Sequence[int],
        is_exact: bool,
        block_len: int = LONGEST,
    ) -> None:
        self._forward, self._weights, self._cache, self._layout = forward, weights, cache, layout
        self._num_slots = num_slots
        self.chunk_sizes, self.is_exact, self._block_len = tuple(chunk_sizes), is_exact, block_len
        # Two rows cost what four do: products of fewer are slow, or no faster.
        self._row_rungs = (1, *ladder(num_slots, 2, 4)) if num_slots > 1 else (1,)
        self._chunk_rungs = tuple(sorted(chunk_sizes))
        self._page_len = cache.plan.page_len
        most = cache.pages_per_seq + (0 if is_exact else -(-self._chunk_rungs[-1] // self._page_len))
        least = max(1, SMALLEST_GATHER_LEN // self._page_len)
        self._page_rungs = ladder(most, 2, least) if layout.pages else (0,)
        facts = forward.program
        self._step = KeptFunction(
            programs, "gathered", self.traced, donate=["pools", "states"], facts=facts.found_out, recall=facts.recall
        )

    @property
    def num_programs(self) -> int:
        """Compiled steps."""
        return self._step.num_programs

    def traced(
        self,
        weights: Mapping[str, jax.Array],
        pools: Leaves,
        states: Leaves,
        last_tokens: jax.Array,
        numbers: jax.Array,
        spec: GatheredSpec,
    ) -> tuple[jax.Array, Leaves, Leaves]:
        """A step, to be traced: float32[S, vocab] logits, or [T, vocab], and pools and states."""
        given = _Numbers(*jnp.split(numbers, np.cumsum(spec.sizes)[:-1]))
        known = last_tokens[jnp.minimum(given.slots, self._num_slots - 1)]
        ids = given.ids.reshape(spec.num_rows, spec.num_tokens)
        ids = jnp.where(ids == ON_DEVICE, known[:, None], ids)
        table = given.tables.reshape(spec.num_rows, spec.num_pages)
        if spec.kind == "begin":
            logits, news = self._forward.begin(weights, ids[0], given.lens[0], self._layout, **spec.how)
            news = jax.tree.map(lambda new: new[None], news)
        else:
            dense = tuple(gather(pool, table, given.starts) for pool in pools)
            kept = self._layout.join(dense, tuple(state[given.slots] for state in states))
            logits, news = self._advance(weights, kept, ids, given, spec)
        new_pages, new_states = self._layout.split(news)
        pools = tuple(
            self._laid_out(scatter(pool, table, given.starts, given.lens, new))
            for pool, new in zip(pools, new_pages, strict=True)
        )
        states = tuple(state.at[given.slots].set(new) for state, new in zip(states, new_states, strict=True))
        return logits, pools, states

    def _laid_out(self, pool: jax.Array) -> jax.Array:
        """`pool` as the cache has it, by heads, where the model lies on a mesh."""
        sharding = self._forward.program.sharding
        return (
            pool if sharding is None else jax.lax.with_sharding_constraint(pool, sharding.pool_sharding(pool.shape[1]))
        )

    def _advance(
        self, weights: Mapping[str, jax.Array], kept: Leaves, ids: jax.Array, given: _Numbers, spec: GatheredSpec
    ) -> tuple[jax.Array, Leaves]:
        """Logits, and what is new by leaf, ``[S, ...]``."""
        if spec.kind == "decode":
            return self._forward.extend_rows(weights, kept, given.starts, ids[:, 0], self._layout)
        kept = jax.tree.map(lambda leaf: leaf[0], kept)
        offset, length = given.starts[0], given.lens[0]
        logits, news = self._forward.extend(weights, kept, offset, ids[0], length, self._layout, **spec.how)
        return logits, jax.tree.map(lambda new: new[None], news)

    def run(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        last_tokens: jax.Array,
        *,
        ahead: int = 0,
        all_logits: bool = False,
    ) -> jax.Array:
        """Computes `rows` of a plan; the first ``len(rows)`` rows of the logits float32[S, vocab] are theirs.

        Args:
            rows: at most `num_slots`, the chunk of a prompt last.
            tables: of the one group there is, or none: int32[num_slots, pages_per_seq].
            last_tokens: int32[num_slots], sampled last in each slot.
            ahead: decode steps since the plan's first one.
            all_logits: logits of every token, float32[at least num_tokens, vocab], in the order of the rows.
        """
        jobs = self._jobs(rows, ahead, all_logits)
        parts = []
        for job in jobs:
            numbers = self._numbers(job, tables, ahead)
            logits, self._cache.pools, self._cache.states = self._step(
                self._weights,
                self._cache.pools,
                self._cache.states,
                last_tokens,
                from_host(numbers, np.int32),
                spec=job.spec,
            )
            parts.append(logits)
        if len(jobs) == 1:
            return parts[0]
        out = jnp.zeros((self._num_out(jobs), parts[0].shape[1]), jnp.float32)
        for job, logits in zip(jobs, parts, strict=True):
            places = np.full(len(logits), len(out), np.int32)  # out of bounds, hence dropped
            places[: len(job.places)] = job.places
            out = _place(out, logits, from_host(places, np.int32))
        return out

    def _num_out(self, jobs: Sequence[_Job]) -> int:
        num_rows = sum(len(job.places) for job in jobs if not job.spec.all_logits)
        num_tokens = sum(job.spec.num_tokens for job in jobs if job.spec.all_logits)
        return num_tokens + (rung(self._row_rungs, num_rows) if num_rows else 0)

    def _jobs(self, rows: Sequence[PlanRow], ahead: int, all_logits: bool) -> list[_Job]:
        """The programs that a step needs, and where in it their logits belong."""
        decode = [(place, row) for place, row in enumerate(rows) if row.is_decode]
        jobs = self._decode_jobs(decode, ahead)
        for place, row in enumerate(rows):
            if not row.is_decode:
                spec = self._chunk_spec(row, all_logits)
                places = range(place, place + (row.num_tokens if all_logits else 1))
                jobs.append(_Job(spec, [row], list(places)))
        return jobs

    def _decode_jobs(self, decode: list[tuple[int, PlanRow]], ahead: int) -> list[_Job]:
        if not decode:
            return []
        num_pages = self._pages_for(max(row.start for _, row in decode) + ahead + 1)
        most = self._most_rows(num_pages)
        if len(decode) <= most:
            spec = self._decode_spec(rung(self._row_rungs, len(decode)), num_pages)
            return [_Job(spec, [row for _, row in decode], [place for place, _ in decode])]
        longest_first = sorted(decode, key=lambda entry: -entry[1].start)
        return self._decode_jobs(longest_first[:most], ahead) + self._decode_jobs(longest_first[most:], ahead)

    def _most_rows(self, num_pages: int) -> int:
        """The highest rung of rows that a decode program of `num_pages` each has."""
        fitting = [r for r in self._row_rungs if r * num_pages * self._page_len <= MAX_GATHERED_LEN]
        return fitting[-1] if fitting else 1

    def _pages_for(self, num_tokens: int) -> int:
        return rung(self._page_rungs, -(-num_tokens // self._page_len)) if self._layout.pages else 0

    def _chunk_spec(self, row: PlanRow, all_logits: bool) -> GatheredSpec:
        num_tokens = rung(self._chunk_rungs, row.num_tokens)
        assert not self.is_exact or num_tokens == row.num_tokens
        return self._chunk_spec_of(num_tokens, row.start, all_logits)

    def _chunk_spec_of(self, num_tokens: int, start: int, all_logits: bool = False) -> GatheredSpec:
        num_pages = self._pages_for(start + num_tokens)
        if start == 0 and num_pages:
            num_pages = -(-num_tokens // self._page_len)  # nothing to gather
        kind: Kind = "extend" if start else "begin"
        return GatheredSpec(kind, num_tokens, 1, num_pages, self._block_len, all_logits)

    @staticmethod
    def _decode_spec(num_rows: int, num_pages: int) -> GatheredSpec:
        return GatheredSpec("decode", 1, num_rows, num_pages, 1)

    def _numbers(self, job: _Job, tables: Sequence[np.ndarray], ahead: int) -> np.ndarray:
        spec = job.spec
        numbers = np.zeros(sum(spec.sizes), np.int32)
        parts = _Numbers(*np.split(numbers, np.cumsum(spec.sizes)[:-1]))  # views
        parts.slots[:] = self._num_slots
        for index, row in enumerate(job.rows):
            begin = index * spec.num_tokens
            parts.ids[begin : begin + row.num_tokens] = ON_DEVICE if row.token_ids is None else row.token_ids
            parts.slots[index] = row.slot
            parts.starts[index] = row.start + ahead
            parts.lens[index] = row.num_tokens
        if spec.num_pages:
            table = tables[0][[row.slot for row in job.rows], : spec.num_pages]
            parts.tables.reshape(spec.num_rows, -1)[: len(job.rows), : table.shape[1]] = table
        return numbers

    def num_rows(self, rows: Sequence[PlanRow]) -> int:
        """Rows of the logits of a step with these rows."""
        return rung(self._row_rungs, len(rows))

    def first_pages(self) -> tuple[np.ndarray, ...]:
        """Page tables that give slot 0 the first pages there are, for a cache that nobody uses."""
        tables = []
        for group in self._cache.plan.groups:
            table = np.zeros((self._num_slots, self._cache.pages_per_seq), np.int32)
            num_pages = min(group.num_pages - 1, self._cache.pages_per_seq)
            table[0, :num_pages] = np.arange(1, num_pages + 1)
            tables.append(table)
        return tuple(tables)

    def padded_rows(self, numbers: np.ndarray) -> np.ndarray:
        """A number for each row, with zeros up to the rung that a step of so many rows has."""
        padded = np.zeros(rung(self._row_rungs, len(numbers)), np.int32)
        padded[: len(numbers)] = numbers
        return padded

    def _specs(self) -> Iterator[GatheredSpec]:
        """Every step there can be, of those that mixed traffic meets."""
        for num_pages in self._page_rungs:
            for num_rows in self._row_rungs:
                if num_rows <= self._most_rows(num_pages):
                    yield self._decode_spec(num_rows, num_pages)
        for num_tokens in self._chunk_rungs:
            yield self._chunk_spec_of(num_tokens, 0)
            least = self._pages_for(1 + num_tokens)
            for num_pages in self._page_rungs:
                if num_pages >= least:
                    yield dataclasses.replace(self._chunk_spec_of(num_tokens, 1), num_pages=num_pages)

    def temporary_bytes(self) -> int:
        """What the largest steps take beside weights, cache and results, as the compiler plans it."""
        largest = self._chunk_rungs[-1]
        return max(self._temporary_bytes(spec) for spec in (self.decode_spec(), self.chunk_spec(largest)))

    def decode_spec(self) -> GatheredSpec:
        """The decode step of the most requests that are of full length."""
        longest = self._page_rungs[-1]
        return self._decode_spec(self._most_rows(longest), longest)

    def chunk_spec(self, num_tokens: int) -> GatheredSpec:
        """The chunk of the prompt of a request of full length that `num_tokens` tokens are computed in, or a part."""
        fitting = [size for size in self._chunk_rungs if size <= num_tokens] if self.is_exact else []
        size = fitting[-1] if fitting else rung(self._chunk_rungs, num_tokens)
        return dataclasses.replace(self._chunk_spec_of(size, 1), num_pages=self._page_rungs[-1])

    def _temporary_bytes(self, spec: GatheredSpec) -> int:
        return self._step.temporary_bytes(
            self._weights,
            self._cache.pools,
            self._cache.states,
            from_host(np.zeros(self._num_slots), np.int32),
            from_host(np.zeros(sum(spec.sizes)), np.int32),
            spec=spec,
        )

    def warm_up(self, last_tokens: Callable[[], jax.Array]) -> Iterator[jax.Array]:
        """Compiles every step that mixed traffic meets and runs it on nothing of anybody's; yields its logits.

        Between two steps the array that `last_tokens` answers may be given away.
        """
        for spec in self._specs():
            yield self._warm_up(spec, last_tokens())

    def _warm_up(self, spec: GatheredSpec, last_tokens: jax.Array) -> jax.Array:
        numbers = self._numbers(_Job(spec, [], []), (), 0)
        logits, self._cache.pools, self._cache.states = self._step(
            self._weights,
            self._cache.pools,
            self._cache.states,
            last_tokens,
            from_host(numbers, np.int32),
            spec=spec,
        )
        for num_rows in self._row_rungs:
            if num_rows > 1:
                out = jnp.zeros((num_rows, logits.shape[1]), jnp.float32)
                _place(out, logits, from_host(np.full(len(logits), num_rows), np.int32))
        return logits


@partial(jax.jit, donate_argnums=0)
def _place(out: jax.Array, logits: jax.Array, places: jax.Array) -> jax.Array:
    return out.at[places].set(logits, mode="drop")
