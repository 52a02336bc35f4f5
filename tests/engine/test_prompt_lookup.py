"""Prompt lookup and the bookkeeping of accepted drafts on the device against lists on the host."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchax_serve.executors.speculation.prompt_lookup import TokenHistory, accept, last_tokens, lookup, verify_rows
from torchax_serve.executors.speculation.speculative_decode import read_drafts

MAX_LEN, NUM_DRAFTS = 24, 3
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=18), min_size=2, max_size=2)


def history_of(texts):
    ids = np.full((len(texts), MAX_LEN), 7, np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    return TokenHistory(jnp.asarray(ids), jnp.asarray([len(text) for text in texts], jnp.int32))


def looked_up(text, longest, shortest):
    """The drafts of one text; None if nothing matches."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for follower in range(len(text) - 1, size - 1, -1):
            if text[follower - size : follower] == text[-size:]:
                extended = list(text)
                for i in range(NUM_DRAFTS):
                    extended.append(extended[follower + i])
                return extended[len(text) :]
    return None


_lookup = jax.jit(lookup, static_argnums=(1, 2, 3))
_accept = jax.jit(accept)
_verify_rows = jax.jit(verify_rows, static_argnums=2)


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, sizes=st.sampled_from([(4, 2), (1, 1), (3, 3)]))
def test_lookup_finds_the_longest_match_and_the_last_of_these(texts, sizes):
    drafts, is_found = _lookup(history_of(texts), NUM_DRAFTS, *sizes)
    for text, draft, found in zip(texts, drafts.tolist(), is_found.tolist(), strict=True):
        expected = looked_up(text, *sizes)
        assert found == (expected is not None)
        assert expected in (None, draft)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), texts=TEXTS)
def test_drafts_are_accepted_up_to_the_first_that_is_wrong(data, texts):
    token = st.integers(0, 2)
    drafts = data.draw(st.lists(st.lists(token, min_size=3, max_size=3), min_size=2, max_size=2))
    sampled = data.draw(st.lists(st.lists(st.integers(-1, 2), min_size=4, max_size=4), min_size=2, max_size=2))
    num_drafts = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2))
    active = data.draw(st.lists(st.booleans(), min_size=2, max_size=2))
    args = (jnp.asarray(x, jnp.int32) for x in (drafts, num_drafts, sampled))
    after, counts = _accept(history_of(texts), *args, jnp.asarray(active))
    for row, text in enumerate(texts):
        expected = list(text)
        for i in range(num_drafts[row] + 1 if active[row] else 0):
            expected.append(max(0, sampled[row][i]))
            if i == num_drafts[row] or drafts[row][i] != sampled[row][i]:
                break
        assert int(after.lens[row]) == len(expected) and int(counts[row]) == len(expected) - len(text)
        assert after.ids[row, : len(expected)].tolist() == expected
    assert last_tokens(after).tolist() == [int(after.ids[row, after.lens[row] - 1]) for row in range(2)]


@settings(max_examples=100, deadline=None)
@given(
    num_drafts=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    active=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_a_step_has_the_tokens_of_its_rows_one_after_the_other(num_drafts, active):
    rows = _verify_rows(jnp.asarray(num_drafts, jnp.int32), jnp.asarray(active), 16)
    expected = [(row, i) for row in range(4) if active[row] for i in range(num_drafts[row] + 1)]
    assert int(rows.num_tokens) == len(expected) == int(rows.cu_q_lens[-1])
    got = list(zip(rows.rows.tolist(), rows.offsets.tolist(), strict=True))
    assert got[: len(expected)] == expected
    assert set(got[len(expected) :]) <= {expected[-1]} if expected else True
    begins = np.cumsum([0, *(a * (n + 1) for a, n in zip(active, num_drafts, strict=True))])
    assert rows.cu_q_lens.tolist() == begins.tolist()


def test_results_are_read_row_by_row():
    results = np.zeros((3, 4, 2 + 3), np.int32)
    results[0, 0] = [5, 6, 7, 3, 2]  # both drafts accepted
    results[1, 0] = [8, 0, 0, 1, 2]  # none
    results[0, 1] = [9, 0, 0, 1, 0]
    read = read_drafts(results, 2)
    assert read.tokens == [(5, 6, 7, 8), (9,)]
    assert (read.num_steps, read.num_drafted, read.num_accepted) == (2, 4, 2)
