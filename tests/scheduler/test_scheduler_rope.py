"""Keys that depend on how long a sequence is: each request gets what it gets alone, whoever runs beside it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_device import VOCAB, FakeDevice, make_config, make_loop

from model_adapters.program.rope_lengths import RopeLengths
from torchax_serve.scheduler import CacheGroup, Request

BORDER = 10
DYNAMIC = RopeLengths(BORDER, has_one_long=False)
LONG = RopeLengths(BORDER, has_one_long=True)
COMPUTED_ANEW = RopeLengths(BORDER, has_one_long=True, recompute_len=BORDER)
DYNAMIC_ANEW = RopeLengths(BORDER, has_one_long=False, recompute_len=BORDER + 3)
ALL = (DYNAMIC, LONG, COMPUTED_ANEW, DYNAMIC_ANEW)


def rotated(token, rope, length):
    """What the device is given for `token` in a sequence of `length` tokens."""
    if length <= rope.border:
        return token
    return token + VOCAB * (1 if rope.has_one_long else length)


class RotatingDevice(FakeDevice):
    def __init__(self, config):
        super().__init__(config)
        self.rope = config.rope

    def _compute(self, row, position, value, tables):
        return super()._compute(row, position, rotated(value, self.rope, max(row.rope_len, position + 1)), tables)


class Alone(FakeDevice):
    """The same device with a sequence of its own in pages of one token."""

    def __init__(self, windows, rope, length):
        groups = tuple(CacheGroup(f"{i}", window, length + 2) for i, window in enumerate(windows))
        super().__init__(make_config(*groups, page_size=1, max_num_seqs=1, max_model_len=length + 1))
        self.rope = rope

    def answer(self, prompt, num):
        tokens, rope_len, begin = list(prompt), len(prompt), 0
        tables = [[list(range(1, len(prompt) + num + 1))]] * len(self.windows)
        while len(tokens) < len(prompt) + num:
            recompute_len = self.rope.recompute_len
            if recompute_len is not None and rope_len <= recompute_len < len(tokens):
                rope_len, begin = len(tokens), 0
            for position in range(begin, len(tokens)):
                value = rotated(tokens[position], self.rope, max(rope_len, position + 1))
                value = self._through(position, value, tables)
            begin = len(tokens)
            tokens.append(value % VOCAB)
        return tokens[len(prompt) :]

    def _through(self, position, value, tables):
        row = dataclasses.make_dataclass("Row", ["slot"])(0)
        return super()._compute(row, position, value, [np.array(table) for table in tables])


def run(asked, rope, *groups, **options):
    loop = make_loop(*groups, depth=1, rope=rope, **options)
    loop.device = RotatingDevice(loop.scheduler.config)
    for request in asked:
        loop.scheduler.add(request)
        loop.step()
    loop.drain()
    return loop


def request(request_id, prompt, max_new, **options):
    return Request(request_id=request_id, prompt_ids=prompt, max_new_tokens=max_new, **options)


def truth(loop, rope, asked):
    windows = loop.device.windows
    return {r.request_id: Alone(windows, rope, 64).answer(r.prompt_ids, r.max_new_tokens) for r in asked}


@given(
    sizes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=7),
    rope=st.sampled_from(ALL),
    groups=st.sampled_from(
        [
            (CacheGroup("full", None, 65),),
            (CacheGroup("full", None, 14),),
            (CacheGroup("a", None, 33), CacheGroup("b", 6, 17)),
        ]
    ),
    max_num_steps=st.sampled_from([1, 4]),
    max_num_batched_tokens=st.sampled_from([7, 32]),
)
def test_requests_with_a_common_beginning_get_what_they_get_alone(
    sizes, rope, groups, max_num_steps, max_num_batched_tokens
):
    asked = [request(i, [7] * length, max_new) for i, (length, max_new) in enumerate(sizes)]
    loop = run(asked, rope, *groups, max_num_steps=max_num_steps, max_num_batched_tokens=max_num_batched_tokens)
    assert loop.tokens == truth(loop, rope, asked)


@pytest.mark.parametrize("rope", ALL)
def test_pages_are_shared_on_one_side_of_the_border_alone(rope):
    def hits(first, second):
        loop = make_loop(rope=rope)
        for i, length in enumerate((first, second)):
            loop.scheduler.add(request(i, [7] * length, 1))
            loop.drain()
        return loop.scheduler.stats().num_hit_tokens

    assert hits(6, 9) == 4  # a page of four tokens
    assert hits(9, 13) == 0
    assert hits(13, 9) == 0
    assert hits(13, 13) == 12
    assert hits(13, 17) == (12 if rope.has_one_long else 0)


def test_a_sequence_that_grows_past_the_border_is_computed_anew_once():
    loop = run([request(0, [7] * 6, 12)], COMPUTED_ANEW, max_num_steps=4)
    assert loop.scheduler.stats().num_preemptions == 1
    anew = [row for plan in loop.plans for row in plan.prefill_rows if row.rope_len > BORDER]
    assert [(row.context_len, row.num_tokens) for row in anew] == [(0, BORDER + 1)]
    assert run([request(0, [7] * 6, 5)], COMPUTED_ANEW).scheduler.stats().num_preemptions == 0  # its last token is fed


def test_salts_stay_apart_whatever_they_are():
    config = make_config(rope=LONG)
    salts = {config.prefix_salt(salt, length) for salt in ("", "long:", ":", "a") for length in (5, 20)}
    assert len(salts) == 8
    assert make_config().prefix_salt("a", 20) == "a"
