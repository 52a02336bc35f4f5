"""The log of events against the pages themselves: whoever follows it knows which prefixes can be found."""

import random

import pytest

from torchax_serve.scheduler import (
    BlockEventLog,
    CacheGroup,
    ClearedBlocks,
    PageAllocator,
    RemovedBlocks,
    SchedulerConfig,
    StoredBlocks,
)
from torchax_serve.scheduler.block_events import stable_page_hash
from torchax_serve.scheduler.types import MAX_TOKEN_ID

PAGE = 4
LAYERS = {
    "full": (CacheGroup("full", None, 10),),
    "host": (CacheGroup("full", None, 8, num_host_pages=6),),
    "windows": (CacheGroup("full", None, 12), CacheGroup("window", 6, 10, num_host_pages=4)),
}


def make_book(groups):
    config = SchedulerConfig(
        groups=groups,
        page_size=PAGE,
        max_num_seqs=3,
        max_model_len=64,
        max_num_batched_tokens=64,
        min_prefill_chunk=4,
    )
    log = BlockEventLog(groups, PAGE)
    return PageAllocator(config, stable_page_hash, log), log


class Follower:
    """Prefixes by group, medium and salt, from events alone."""

    def __init__(self):
        self.prefixes, self.there = {}, set()

    def follow(self, log):
        for event in log.take():
            if isinstance(event, ClearedBlocks):
                self.there = set()
            elif isinstance(event, RemovedBlocks):
                for each in event.block_hashes:
                    self.there.remove((event.group, event.medium, each))
            else:
                self._store(event)

    def _store(self, event):
        salt, tokens = (event.salt, ()) if event.parent_hash is None else self.prefixes[event.parent_hash]
        assert salt == event.salt and len(event.token_ids) == PAGE * len(event.block_hashes)
        for index, each in enumerate(event.block_hashes):
            tokens += tuple(event.token_ids[index * PAGE : (index + 1) * PAGE])
            assert self.prefixes.setdefault(each, (salt, tokens)) == (salt, tokens)
            assert (event.group, event.medium, each) not in self.there
            self.there.add((event.group, event.medium, each))

    def has(self, group, salt, tokens):
        known = {self.prefixes[each] for of, _, each in self.there if of == group}
        return (salt, tuple(tokens)) in known


def run(book, tokens, salt=""):
    match = book.match_prefix(tokens, salt, True)
    if not book.can_allocate(match, len(tokens), [0] * len(book.page_tables)):
        return None
    pages = book.allocate_slot(match, salt, True)
    for num in range(len(match.nodes) * PAGE + 1, len(tokens) + 1):  # token by token: windows move
        book.grow_all([(pages, num)])
        book.publish_prefix(pages, tokens, num)
    return pages


@pytest.mark.parametrize("layers", LAYERS)
def test_who_follows_the_log_knows_what_can_be_found(layers):
    draw, groups = random.Random(layers), LAYERS[layers]
    book, log = make_book(groups)
    follower, live, num_found = Follower(), [], 0
    for turn in range(400):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(5, 14))]
        salt = draw.choice(["", "", "tenant"])
        match = book.match_prefix(tokens, salt, True)
        follower.follow(log)
        for index in range(len(match.nodes)):
            for group, first in enumerate(match.first_live):
                if index >= first:
                    assert follower.has(group, salt, tokens[: PAGE * (index + 1)])
        behind = tokens[: PAGE * (len(match.nodes) + 1)]
        if len(groups) == 1 and len(behind) < len(tokens) and len(behind) % PAGE == 0:
            assert not follower.has(0, salt, behind)
        num_found += len(match.nodes)
        if len(live) < 3 and (pages := run(book, tokens, salt)) is not None:
            live.append(pages)
        elif live:
            book.release(live.pop(draw.randrange(len(live))))
        if turn % 97 == 96:
            book.clear_prefix_cache(live)
            follower.follow(log)
            assert not follower.there
    assert num_found > 20


def test_pages_of_one_prompt_are_one_event():
    book, log = make_book(LAYERS["full"])
    run(book, list(range(13)))
    (event,) = log.take()
    assert isinstance(event, StoredBlocks) and event.parent_hash is None and event.medium == "GPU"
    assert event.token_ids == list(range(12)) and len(event.block_hashes) == 3
    run(book, [*range(8), 9, 9, 9, 9, 9])
    (behind,) = log.take()
    assert behind.parent_hash == event.block_hashes[1] and behind.token_ids == [9, 9, 9, 9]
    assert not len(log)


def test_the_log_ends_before_an_image():
    book, log = make_book(LAYERS["full"])
    image = MAX_TOKEN_ID + 1
    pages = run(book, [1, 2, 3, 4, image, 5, 6, 7, 8, 9, 10, 11, 12])
    (event,) = log.take()
    assert event.token_ids == [1, 2, 3, 4]
    book.release(pages)
    book.clear_prefix_cache()
    assert log.take() == [ClearedBlocks()]
    book.release(run(book, list(range(20, 33))))
    (stored,) = log.take()
    run(book, list(range(40, 73)))  # all pages: what was idle is evicted
    gone = [each for event in log.take() if isinstance(event, RemovedBlocks) for each in event.block_hashes]
    assert sorted(gone) == sorted(stored.block_hashes)


def test_hashes_cover_tokens_parents_and_salts():
    first = stable_page_hash(0, (1, 2), "")
    assert first == 0xAB25350E3E65EFEB  # in every process
    others = [stable_page_hash(0, (1, 3), ""), stable_page_hash(1, (1, 2), ""), stable_page_hash(0, (1, 2), "\ud800")]
    assert len({first, *others}) == 4
