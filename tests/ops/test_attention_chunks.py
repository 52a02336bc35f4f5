"""Chunks of attention as rows of a step, beside a list of each token and what it sees."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model_adapters.ops.attention_chunks import chunks_of_step, decode_chunks

PAGE, PAGES = 2, 12


@st.composite
def steps(draw):
    """Pairs of stored and new tokens of each sequence, and the size of chunks."""
    counts = st.tuples(st.integers(0, 12), st.integers(0, 12))
    return draw(st.lists(counts, min_size=1, max_size=4)), draw(st.sampled_from([2, 4, 8]))


def seen(table, lens, cu):
    """Places in the pool that each token sees, by the meaning of a row of paged attention."""
    found = []
    for row, length in enumerate(lens):
        for place in range(cu[row], cu[row + 1]):
            last = length - (cu[row + 1] - place)
            found.append([int(table[row, position // PAGE]) * PAGE + position % PAGE for position in range(last + 1)])
    return found


@given(steps())
def test_a_token_sees_its_chunk_up_to_itself(step):
    counts, chunk = step
    table = np.arange(len(counts) * PAGES, dtype=np.int32).reshape(len(counts), PAGES)
    new = np.array([each for _, each in counts])
    lens = np.array([before + each if each else 0 for before, each in counts], np.int32)
    cu = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    expected = [
        [int(table[row, at // PAGE]) * PAGE + at % PAGE for at in range(position // chunk * chunk, position + 1)]
        for row, (before, each) in enumerate(counts)
        for position in range(before, before + each)
    ]
    rows = [np.asarray(x) for x in chunks_of_step(table, lens, cu, int(cu[-1]) + 3, chunk, PAGE)]
    assert rows[0].shape[1] == chunk // PAGE
    assert (np.diff(rows[2]) >= 0).all() and rows[2][-1] == cu[-1]
    assert seen(*rows) == expected


@given(st.lists(st.integers(0, PAGE * PAGES), min_size=1, max_size=4), st.sampled_from([2, 4, 8]))
def test_a_new_token_sees_its_chunk(lens, chunk):
    lens = np.array(lens, np.int32)
    table = np.arange(len(lens) * PAGES, dtype=np.int32).reshape(len(lens), PAGES)
    own, kept = map(np.asarray, decode_chunks(table, lens, chunk, PAGE))
    for row, length in enumerate(lens):
        begin = max(length - 1, 0) // chunk * chunk
        assert kept[row] == length - begin
        needed = -(-kept[row] // PAGE)
        assert own[row, :needed].tolist() == table[row, begin // PAGE :][:needed].tolist()
