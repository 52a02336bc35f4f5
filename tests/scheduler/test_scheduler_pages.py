"""PagePool against a plain dictionary, and the book of all groups: hits, windows, forks, collisions, salts."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchax_serve import InvalidArgumentError, OutOfMemoryError
from torchax_serve.scheduler import CacheGroup, PageAllocator, PageCopy, PagePool, SchedulerConfig

NUM_PAGES = 8


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocate, allocate_all, share, free, remember and forget."""

    num_operations = 0

    def __init__(self):
        super().__init__()
        self.evicted: list = []
        self.pool = PagePool(NUM_PAGES, lambda page, prefix: self.evicted.append((page, prefix)))
        self.refs: dict[int, int] = {}  # the model: references by used page,
        self.idle: list[int] = []  # idle pages, longest idle first,
        self.prefixes: dict[int, int] = {}  # and what pages remember
        self.num_prefixes = 0

    @rule()
    def allocate(self):
        PoolMachine.num_operations += 1
        if len(self.refs) == NUM_PAGES - 1:
            with pytest.raises(OutOfMemoryError, match="7 in use"):
                self.pool.allocate()
            return
        has_free = len(self.refs) + len(self.idle) < NUM_PAGES - 1
        expected = [] if has_free else [(self.idle[0], self.prefixes[self.idle[0]])]
        self.evicted.clear()
        page = self.pool.allocate()
        assert self.evicted == expected
        assert page not in self.refs
        assert 0 < page < NUM_PAGES
        if has_free:
            assert page not in self.idle
        else:
            assert page == self.idle.pop(0)
            del self.prefixes[page]
        self.refs[page] = 1

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def allocate_all(self, num_pages):
        PoolMachine.num_operations += 1
        num_available = NUM_PAGES - 1 - len(self.refs)
        if num_pages > num_available:
            with pytest.raises(OutOfMemoryError, match=f"expected {num_pages} free pages, got {num_available}"):
                self.pool.allocate_all(num_pages)
            return
        num_evicted = max(0, num_pages - num_available + len(self.idle))
        oldest, self.idle = self.idle[:num_evicted], self.idle[num_evicted:]
        self.evicted.clear()
        pages = self.pool.allocate_all(num_pages)
        assert self.evicted == [(page, self.prefixes.pop(page)) for page in oldest]
        assert len(set(pages)) == num_pages
        assert pages[num_pages - num_evicted :] == oldest
        assert not self.refs.keys() & set(pages)
        assert not set(self.idle) & set(pages)
        self.refs |= dict.fromkeys(pages, 1)

    @rule(page=st.integers(-1, NUM_PAGES))
    def share(self, page):
        PoolMachine.num_operations += 1
        if page not in self.refs and page not in self.idle:
            with pytest.raises(InvalidArgumentError, match=f"got page {page}"):
                self.pool.share(page)
            return
        self.pool.share(page)
        if page in self.idle:
            self.idle.remove(page)
        self.refs[page] = self.refs.get(page, 0) + 1

    @rule(page=st.integers(-1, NUM_PAGES))
    def free(self, page):
        PoolMachine.num_operations += 1
        if page not in self.refs:
            with pytest.raises(InvalidArgumentError, match="freed before"):
                self.pool.free(page)
            return
        self.pool.free(page)
        self.refs[page] -= 1
        if not self.refs[page]:
            del self.refs[page]
            if page in self.prefixes:
                self.idle.append(page)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def remember(self, data):
        PoolMachine.num_operations += 1
        page = data.draw(st.sampled_from(sorted(self.refs)))
        self.num_prefixes += 1
        if page in self.prefixes:
            with pytest.raises(InvalidArgumentError, match="without a prefix"):
                self.pool.set_prefix(page, self.num_prefixes)
            return
        self.pool.set_prefix(page, self.num_prefixes)
        self.prefixes[page] = self.num_prefixes

    @rule(chance=st.integers(0, 9))
    def clear_prefixes(self, chance):
        if chance:
            return
        PoolMachine.num_operations += 1
        self.evicted.clear()
        self.pool.clear_prefixes()
        assert dict(self.evicted) == self.prefixes
        self.prefixes.clear()
        self.idle.clear()

    @invariant()
    def agrees(self):
        self.pool.check_integrity([page for page, num in self.refs.items() for _ in range(num)])
        assert self.pool.num_available == NUM_PAGES - 1 - len(self.refs)
        assert self.pool.num_cached == len(self.idle)
        assert self.pool.prefixes() == self.prefixes

    def teardown(self):
        for page, num in self.refs.items():
            for _ in range(num):
                self.pool.free(page)
        self.pool.check_integrity([])
        assert self.pool.num_available == NUM_PAGES - 1


def test_pool_agrees_with_a_dictionary():
    few = settings(
        max_examples=200,
        stateful_step_count=50,
        suppress_health_check=list(HealthCheck),
    )
    PoolMachine.num_operations = 0
    PoolMachine.TestCase.settings = few
    PoolMachine.TestCase("runTest").runTest()
    assert PoolMachine.num_operations > 5000


def test_integrity_sees_a_leak_and_a_lost_reference():
    pool = PagePool(4, lambda page, prefix: None)
    page = pool.allocate()
    for wrong in ([], [page, page], [page, 3 if page != 3 else 2]):
        with pytest.raises(AssertionError, match="references by page: expected"):
            pool.check_integrity(wrong)
    pool.check_integrity([page])


# The book


def make_book(*groups, hash_function=None, max_num_seqs=4, **options):
    groups = groups or (CacheGroup("full", None, 20),)
    config = SchedulerConfig(
        groups=groups,
        page_size=4,
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        max_num_batched_tokens=64,
        min_prefill_chunk=4,
        **options,
    )
    return PageAllocator(config, hash_function) if hash_function else PageAllocator(config)


def compute(book, tokens, salt="", shares=True):
    """Opens a sequence, computes all its tokens; its pages and how many of them were found."""
    match = book.match_prefix(tokens, salt, shares)
    pages = book.allocate_slot(match, salt, shares)
    book.grow_all([(pages, len(tokens))])
    book.publish_prefix(pages, tokens, len(tokens))
    return pages, len(match.nodes) * 4


def table(book, pages, group=0):
    return book.page_tables[group][pages.slot, : pages.num_pages].tolist()


def test_a_prefix_is_found_while_it_is_used_and_after():
    book = make_book()
    tokens = list(range(10))
    first, hit = compute(book, tokens)
    assert hit == 0
    match = book.match_prefix([*tokens, 11], "", True)
    second = book.allocate_slot(match, "", True)
    assert table(book, second) == table(book, first)[:2]
    book.check_integrity([first, second])
    kept = table(book, first)
    book.release(first)
    book.release(second)
    book.check_integrity([])
    assert book.usage()[0].num_used == 0
    assert book.usage()[0].num_cached == 2
    third, hit = compute(book, tokens)
    assert hit == 8
    assert table(book, third)[:2] == kept[:2]


@pytest.mark.parametrize(("length", "expected"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_last_token_is_never_found(length, expected):
    book = make_book()
    first, _ = compute(book, list(range(20)))
    book.release(first)
    assert len(book.match_prefix(list(range(length)), "", True).nodes) * 4 == expected


def test_only_computed_tokens_are_found():
    book = make_book()
    tokens = list(range(13))
    pages = book.allocate_slot(book.match_prefix(tokens, "", True), "", True)
    book.grow_all([(pages, 13)])
    for computed, expected in ((0, 0), (3, 0), (4, 1), (7, 1), (11, 2), (13, 3)):
        book.publish_prefix(pages, tokens, computed)
        assert len(book.match_prefix(tokens, "", True).nodes) == expected


def test_what_follows_another_beginning_is_not_found():
    book = make_book()
    compute(book, [1, 1, 1, 1, 2, 2, 2, 2, 9])
    assert not book.match_prefix([3, 3, 3, 3, 2, 2, 2, 2, 9], "", True).nodes
    assert not book.match_prefix([2, 2, 2, 2, 9], "", True).nodes
    assert len(book.match_prefix([1, 1, 1, 1, 3, 3, 3, 3, 9], "", True).nodes) == 1


def test_salts_do_not_share_and_neither_do_those_who_must_not():
    book = make_book(max_num_seqs=8)
    tokens = list(range(9))
    compute_only = [compute(book, tokens, salt="a")[0], compute(book, tokens, salt="b", shares=False)[0]]
    assert book.usage()[0].num_used == 6
    assert len(book.match_prefix(tokens, "a", True).nodes) == 2
    assert not book.match_prefix(tokens, "a", False).nodes
    assert not book.match_prefix(tokens, "", True).nodes
    assert not book.match_prefix(tokens, "b", True).nodes
    for pages in compute_only:
        book.release(pages)
    assert book.usage()[0].num_cached == 2
    off = make_book(enable_prefix_caching=False)
    compute(off, tokens)
    assert not off.match_prefix(tokens, "", True).nodes


@pytest.mark.parametrize("hash_function", [lambda parent, tokens, salt: 0, lambda parent, tokens, salt: sum(tokens)])
def test_colliding_hashes_never_mix_prefixes(hash_function):
    rng = random.Random(0)
    book = make_book(CacheGroup("full", None, 60), CacheGroup("window", 5, 60), hash_function=hash_function)
    content: dict[int, tuple] = {}  # what each page holds: everything up to its end, and the salt
    num_found = 0
    for _ in range(300):
        tokens, salt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))], rng.choice(["", "a"])
        match = book.match_prefix(tokens, salt, True)
        for i, node in enumerate(match.nodes):
            assert content[node.pages[0]] == (tokens[: i * 4 + 4], salt)
            num_found += 1
        pages, _ = compute(book, tokens, salt)
        for i, page in enumerate(table(book, pages)[: len(tokens) // 4]):
            content[page] = (tokens[: i * 4 + 4], salt)
        book.check_integrity([pages])
        book.release(pages)
        book.check_integrity([])
    assert num_found > 10


def test_the_page_longest_idle_goes_first_and_of_a_chain_its_end():
    book = make_book(CacheGroup("full", None, 8))
    old, _ = compute(book, [1] * 9)
    book.release(old)
    new, _ = compute(book, [2] * 9)
    book.release(new)
    filler, _ = compute(book, [3] * 13, shares=False)
    assert len(book.match_prefix([1] * 9, "", True).nodes) == 1
    assert len(book.match_prefix([2] * 9, "", True).nodes) == 2
    book.release(filler)
    filler, _ = compute(book, [3] * 21, shares=False)
    assert not book.match_prefix([1] * 9, "", True).nodes
    assert len(book.match_prefix([2] * 9, "", True).nodes) == 1
    book.release(filler)
    book.check_integrity([])


def test_pages_behind_the_window_are_freed_and_only_its_end_must_be_found():
    book = make_book(CacheGroup("full", None, 20), CacheGroup("window", 6, 20))
    tokens = list(range(30))
    pages = book.allocate_slot(book.match_prefix(tokens, "", True), "", True)
    book.grow_all([(pages, 30)])
    for computed in range(31):
        book.publish_prefix(pages, tokens, computed)
        book.check_integrity([pages])
        gone = max(0, computed - 5) // 4  # the next query sees 6 positions, its own among them
        window = table(book, pages, 1)
        assert window[:gone] == [0] * gone
        assert 0 not in window[gone:]
        assert 0 not in table(book, pages, 0)
    book.release(pages)
    match = book.match_prefix(tokens[:18], "", True)
    assert (len(match.nodes), match.first_live) == (4, [0, 2])
    found = book.allocate_slot(match, "", True)
    book.check_integrity([found])
    assert table(book, found, 1)[:2] == [0, 0]
    assert 0 not in table(book, found, 1)[2:]
    book.release(found)


def test_without_the_end_of_the_window_a_shorter_prefix_is_found():
    book = make_book(CacheGroup("full", None, 40), CacheGroup("window", 6, 9))
    tokens = list(range(30))
    pages = book.allocate_slot(book.match_prefix(tokens, "", True), "", True)
    book.grow_all([(pages, 30)])
    for computed in range(31):
        book.publish_prefix(pages, tokens, computed)
    book.release(pages)
    book.release(
        book.allocate_slot(book.match_prefix(tokens[:13], "", True), "", True)
    )  # its window's pages, 1 and 2, are fresh again
    filler, _ = compute(book, [40] * 16, shares=False)  # drives pages 0, 3 and 4 out
    assert len(book.match_prefix(tokens[:18], "", True).nodes) == 3
    assert len(book.match_prefix(tokens[:9], "", True).nodes) == 0
    assert len(book.match_prefix(tokens, "", True).nodes) == 7  # its own window does not reach back to the gap
    book.check_integrity([filler])


@pytest.mark.parametrize(
    ("length", "num_shared", "has_copy"), [(8, 2, False), (9, 2, True), (11, 2, True), (3, 0, True)]
)
def test_a_fork_shares_full_pages_and_copies_the_last(length, num_shared, has_copy):
    book = make_book()
    source, _ = compute(book, list(range(13)))
    forked = book.fork(source, length)
    assert forked is not None
    pages, copies = forked
    ours, theirs = table(book, source), table(book, pages)
    assert theirs[:num_shared] == ours[:num_shared]
    if has_copy:
        assert copies == [PageCopy(0, ours[num_shared], theirs[num_shared])]
        assert theirs[num_shared] not in ours
    else:
        assert copies == []
    assert len(theirs) == num_shared + has_copy
    book.check_integrity([source, pages])
    other = [*range(length), *[40] * (16 - length)]  # what the fork goes on with is found under its own tokens only
    book.grow_all([(pages, 16)])
    book.publish_prefix(pages, other, 16)
    assert len(book.match_prefix([*other, 1], "", True).nodes) == 4
    book.check_integrity([source, pages])
    book.release(source)
    book.release(pages)
    book.check_integrity([])
    assert book.usage()[0].num_used == 0


def test_a_fork_of_what_is_gone_or_not_shared_is_refused():
    book = make_book(CacheGroup("window", 6, 20))
    source, _ = compute(book, list(range(30)))
    assert book.fork(source, 29) is not None
    assert book.fork(source, 9) is None
    private, _ = compute(book, list(range(30)), shares=False)
    assert book.fork(private, 29) is None


def test_idle_pages_that_are_found_are_not_available_twice():
    book = make_book(CacheGroup("full", None, 6))
    idle, _ = compute(book, [1] * 9)
    book.release(idle)
    filler, _ = compute(book, [2] * 12, shares=False)
    match = book.match_prefix([1] * 9, "", True)
    assert len(match.nodes) == 2
    assert book.has_pages([1])  # two are available: the very pages that were found
    assert not book.can_allocate(match, 9, [0])
    book.release(filler)
    assert book.can_allocate(match, 9, [2])
    assert not book.can_allocate(match, 9, [3])


def test_forgotten_prefixes_are_not_found():
    book = make_book()
    used, _ = compute(book, [1] * 9)
    idle, _ = compute(book, [2] * 9)
    book.release(idle)
    book.clear_prefix_cache()
    assert not book.match_prefix([1] * 9, "", True).nodes
    assert not book.match_prefix([2] * 9, "", True).nodes
    book.check_integrity([used])
    book.release(used)
    book.check_integrity([])
    assert book.usage()[0].num_cached == 0


def test_page_tables_cannot_be_written():
    book = make_book()
    with pytest.raises(ValueError, match="read-only"):
        book.page_tables[0][0, 0] = 1
