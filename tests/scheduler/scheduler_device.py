"""A device that a person can compute, and a loop that runs a scheduler on it.

Every group of pages is a layer, as in a transformer: it stores its input at the token's place in the pool, and its
output is a hash of what its window shows. The device reads all that back from the pages that the plan names, so a
wrong page table, a page reused too early, a wrong prefix hit or a forgotten copy gives other tokens than `Oracle`,
which computes the same function on a plain list. A recurrent layer stands behind them where there are snapshots: its
state is a hash of all it has seen, in a row for each slot and each snapshot.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from torchax_serve.scheduler import (
    CacheGroup,
    DraftResult,
    DraftRows,
    PlanRow,
    Request,
    RowResult,
    Scheduler,
    SchedulerConfig,
    StepPlan,
)

VOCAB = 50
PRIME = 1_000_003
GARBAGE = 999_999  # what rows that do not sample hand back: nobody may look at it


POSITIONS = np.arange(1 << 14)
FACTORS = POSITIONS * 7919 + 13
"""Of each position; a layer's output is the sum of the values that it sees, each by its factor, modulo `PRIME`."""


def _advance(state: int, value: int) -> int:
    """State of a recurrent layer behind one more input."""
    return (state * 31 + value + 7) % PRIME


class Oracle:
    """The tokens of a request that is alone in the world."""

    def __init__(self, windows: tuple[int | None, ...], has_states: bool = False) -> None:
        self.windows, self.has_states = windows, has_states

    def answer(self, prompt: list[int], num: int, stops: frozenset[int] = frozenset(), min_new: int = 0) -> list[int]:
        """At most `num` tokens, up to the first of `stops` behind the first `min_new`."""
        tokens = list(prompt)
        sums = [[0] for _ in self.windows]  # of each layer, over the values in front of each position
        state = 0
        for position in range(len(prompt) + num):
            value = tokens[position]
            for window, layer in zip(self.windows, sums, strict=True):
                layer.append(layer[-1] + value * (position * 7919 + 13))
                first = 0 if window is None else max(0, position + 1 - window)
                value = (layer[-1] - layer[first]) % PRIME
            if self.has_states:
                value = state = _advance(state, value)
            if position >= len(prompt) - 1:
                tokens.append(value % VOCAB)
                output = tokens[len(prompt) :]
                if len(output) == num or (output[-1] in stops and len(output) > min_new):
                    return output
        raise AssertionError


class FakeDevice:
    """Runs plans in order, and holds that no page has two writers among the plans in flight."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.windows = tuple(group.window for group in config.groups)
        self.pools = [np.full((group.num_pages, config.page_size), -7) for group in config.groups]
        self.places = [pool.reshape(-1) for pool in self.pools]  # the same memory
        self.page_of, self.place_in_page = POSITIONS // self.page_size, POSITIONS % self.page_size
        self.host = [np.full((group.num_host_pages, config.page_size), -8) for group in config.groups]
        self.last = [-7] * config.max_num_seqs
        self.has_states = config.snapshots is not None
        num_rows = (1, 1) if config.snapshots is None else dataclasses.astuple(config.snapshots)
        self.states, self.snapshots, self.host_snapshots = (
            [-9 - i] * n for i, n in enumerate((config.max_num_seqs, *num_rows))
        )
        self.writers: deque[dict] = deque()  # of each plan in flight, request by (group, page)
        self.num_copies = self.num_loads = 0
        self.texts: dict[int, list[int]] = {}  # by slot, tokens of rows with drafts
        self.held: dict[int, int] = {}  # by slot, of these how many its state holds
        self.random = np.random.default_rng(0)

    def run(self, plan: StepPlan) -> np.ndarray | DraftResult:
        """Tokens int[num_rows, num_steps], or those of verify steps."""
        for transfer in plan.page_transfers:
            pool, host = (
                [*self.pools, self.snapshots][transfer.group],
                [*self.host, self.host_snapshots][transfer.group],
            )
            if transfer.is_load:
                pool[transfer.device_page] = host[transfer.host_page]
            else:
                host[transfer.host_page] = pool[transfer.device_page]
            self.num_loads += transfer.is_load
        if plan.drafts is not None:
            return self._verify(plan, plan.drafts)
        tables = [table.copy() for table in plan.page_tables]  # a scheduler may change them after the dispatch
        self._catch_up(plan, tables)
        for slot in plan.fresh_slots:
            self.last[slot] = -7
        sources = [self.pools[copy.group][copy.source].copy() for copy in plan.page_copies]
        for copy, source in zip(plan.page_copies, sources, strict=True):
            self.pools[copy.group][copy.target] = source
            self.num_copies += 1
        self._note_writers(plan, tables)
        self._check_snapshots(plan)
        sampled = np.full((len(plan.rows), plan.num_steps), GARBAGE)
        for step in range(plan.num_steps):
            for index, row in enumerate(plan.rows):
                ids = (self.last[row.slot],) if row.token_ids is None else row.token_ids
                assert len(ids) == row.num_tokens
                source, num_before, target = row.states or (0, 0, 0)
                state = self.snapshots[source] if source else self.states[row.slot]
                state = state if row.context_len + step else 0
                for i, token in enumerate(ids):
                    value = self._compute(row, row.context_len + step + i, token, tables)
                    if self.has_states:
                        value = state = _advance(state, value)
                    if i + 1 == num_before:
                        self.snapshots[target] = state
                if num_before < row.num_tokens:
                    self.states[row.slot] = state
                if row.samples_token:
                    sampled[index, step] = self.last[row.slot] = value % VOCAB
        return sampled

    def _check_snapshots(self, plan: StepPlan) -> None:
        """Nothing that a row of a plan reads or writes is written by another one, and borders are those of pages."""
        kept = [(row, *row.states) for row in plan.rows if row.states is not None]
        targets = [target for _, _, _, target in kept if target]
        assert len(set(targets)) == len(targets) and not set(targets) & {source for _, source, _, _ in kept}
        for row, _, num_before, target in kept:
            assert 0 <= num_before <= row.num_tokens and bool(num_before) == bool(target)
            assert not target or (row.context_len + num_before) % self.page_size == 0

    def _verify(self, plan: StepPlan, drafts: DraftRows) -> DraftResult:
        """Drafts that are right or wrong by chance; wrong ones leave their traces in the pages."""
        tables = [table.copy() for table in plan.page_tables]
        if drafts.histories is not None:
            self._catch_up(plan, tables)
            self.texts = {row.slot: list(text) for row, text in zip(plan.rows, drafts.histories, strict=True)}
            self.held = {slot: len(text) - 1 for slot, text in self.texts.items()}
        self._note_writers(plan, tables)
        tokens: list[list[int]] = [[] for _ in plan.rows]
        num_steps = num_drafted = num_accepted = 0
        for _ in range(plan.num_steps):
            num_before = sum(map(len, tokens))
            for index, row in enumerate(plan.rows):
                text, end = self.texts[row.slot], drafts.ends[index]
                if len(text) > end:
                    continue
                num_drafts = int(self.random.integers(0, max(0, min(drafts.most[index], end - len(text))) + 1))
                num_drafted, first, draft = num_drafted + num_drafts, len(text) - 1, text[-1]
                is_right = True
                state = self._computed_again(row, tables)
                for i in range(num_drafts + 1):
                    value = self._compute(row, first + i, draft, tables)
                    if self.has_states:
                        value = state = _advance(state, value)
                    if i == 0:  # what is behind drafts is dropped
                        self.states[row.slot], self.held[row.slot] = state, first + 1
                    value %= VOCAB
                    draft = value if self.random.random() < 0.7 else (value + 1) % VOCAB
                    if is_right:
                        text.append(value)
                        tokens[index].append(value)
                        num_accepted += i > 0
                    is_right = is_right and draft == value
                self.last[row.slot] = text[-1]
            num_steps += sum(map(len, tokens)) > num_before
        return DraftResult([tuple(each) for each in tokens], num_steps, num_drafted, num_accepted)

    def _computed_again(self, row: PlanRow, tables: list[np.ndarray]) -> int:
        """The state of a slot behind all tokens but the last, of which those it does not hold are computed again."""
        text, state = self.texts[row.slot], self.states[row.slot]
        if self.has_states:
            for position in range(self.held[row.slot], len(text) - 1):
                state = _advance(state, self._compute(row, position, text[position], tables))
        return state

    def _catch_up(self, plan: StepPlan, tables: list[np.ndarray]) -> None:
        """Moves states to the ends of their texts, of slots whose requests run on."""
        for slot, text in self.texts.items() if self.has_states else ():
            page = (len(text) - 2) // self.page_size
            if slot in plan.fresh_slots or not all(table[slot, page] for table in tables):
                continue
            self.states[slot] = self._computed_again(PlanRow(0, slot, 0, 1, None, True), tables)
        self.texts, self.held = {}, {}

    def _compute(self, row: PlanRow, position: int, value: int, tables: list[np.ndarray]) -> int:
        for window, places, table in zip(self.windows, self.places, tables, strict=True):
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            pages = table[row.slot, self.page_of[seen]]
            assert pages.min() > 0, "what a token sees and writes has pages"
            read = pages * self.page_size + self.place_in_page[seen]
            places[read[-1]] = value
            value = int((places[read] * FACTORS[seen] % PRIME).sum() % PRIME)
        return value

    def _note_writers(self, plan: StepPlan, tables: list[np.ndarray]) -> None:
        writers: dict = {}
        for row in plan.rows:
            first, last = row.context_len, row.context_len + row.num_tokens + plan.num_steps - 2
            if plan.drafts is not None:
                first, last = len(self.texts[row.slot]) - 1, plan.drafts.ends[plan.rows.index(row)] - 1
            for group, table in enumerate(tables):
                for page in table[row.slot, first // self.page_size : last // self.page_size + 1].tolist():
                    others = [other.get((group, page), row.request_id) for other in (*self.writers, writers)]
                    assert set(others) <= {row.request_id}, f"page {page} of group {group} has two writers"
                    writers[group, page] = row.request_id
        self.writers.append(writers)

    def landed(self) -> None:
        """The oldest plan in flight is done with."""
        self.writers.popleft()


@dataclasses.dataclass
class Loop:
    """A scheduler, its device, and what requests have received."""

    scheduler: Scheduler
    depth: int = 1  # plans ahead of the commit
    now: float = 0.0
    flights: deque = dataclasses.field(default_factory=deque)
    tokens: dict = dataclasses.field(default_factory=dict)
    reasons: dict = dataclasses.field(default_factory=dict)
    plans: list[StepPlan] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.scheduler.config)

    def note(self, outcomes: list[RowResult]) -> None:
        """Collects tokens and ends; a request ends once and gets nothing after."""
        for outcome in outcomes:
            assert outcome.request_id not in self.reasons
            self.tokens.setdefault(outcome.request_id, []).extend(outcome.token_ids)
            if outcome.finish_reason is not None:
                self.reasons[outcome.request_id] = outcome.finish_reason

    def schedule(self) -> StepPlan | None:
        """Plans a step and dispatches it."""
        was_idle = not self.flights
        plan = self.scheduler.schedule(self.now)
        self.note(ended := self.scheduler.pop_finished())
        if plan is not None:
            self.plans.append(plan)
            self.flights.append((plan, self.device.run(plan)))
        assert plan or ended or not was_idle or not len(self.scheduler), "work is left, and nothing is planned"
        return plan

    def commit(self, duration_s: float | None = None) -> None:
        """Commits the oldest plan."""
        plan, sampled = self.flights.popleft()
        self.note(self.scheduler.commit(plan, sampled, self.now, duration_s))
        self.note(self.scheduler.pop_finished())
        self.device.landed()

    def step(self) -> StepPlan | None:
        """One turn of an engine's loop."""
        plan = self.schedule()
        while self.flights and (plan is None or len(self.flights) > self.depth):
            self.commit()
            plan = plan or self.flights  # an empty plan commits one
        self.scheduler.check_integrity()
        return plan

    def drain(self) -> None:
        """Runs until nobody is left, then holds that every page is back."""
        while len(self.scheduler) or self.flights:
            self.step()
        stats = self.scheduler.stats()
        assert [usage.num_used for usage in stats.pages] == [0] * len(stats.pages)
        assert (stats.num_running, stats.num_waiting, stats.num_in_flight) == (0, 0, 0)


def make_config(*groups, **options):
    defaults = {
        "page_size": 4,
        "max_num_seqs": 4,
        "max_model_len": 64,
        "max_num_batched_tokens": 32,
        "min_prefill_chunk": 4,
    }
    return SchedulerConfig(groups=groups or (CacheGroup("full", None, 65),), **(defaults | options))


def make_loop(*groups, depth=0, **options):
    return Loop(Scheduler(make_config(*groups, **options)), depth)


def request(request_id, prompt_len=6, max_new=5, **options):
    return Request(
        request_id=request_id,
        prompt_ids=[request_id] * prompt_len,
        max_new_tokens=max_new,
        cache_prompt=False,
        **options,
    )


def truth(loop, asked):
    return Oracle(loop.device.windows, loop.device.has_states).answer(
        asked.prompt_ids, asked.max_new_tokens, asked.stop_ids, asked.min_new_tokens
    )
