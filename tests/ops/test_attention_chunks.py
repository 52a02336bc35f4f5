"""Chunks of attention as rows of a step, beside a list of each token and what it sees."""

import jax
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model_adapters.ops.attention_chunks import chunks_of_step, decode_chunks

PAGE, PAGES = 2, 12
STEP = jax.jit(chunks_of_step, static_argnums=(3, 4, 5))
DECODE = jax.jit(decode_chunks, static_argnums=(2, 3))
NUM_TOKENS = 8, 24, 48
"""Sizes of steps, most of which have some padding: each size of a step, a table and a chunk is a program."""


@st.composite
def steps(draw):
    """Pairs of stored and new tokens of each sequence, the size of chunks, and the tokens of the step with padding."""
    counts = st.tuples(st.integers(0, 12), st.integers(0, 12))
    of_seqs = draw(st.sampled_from([1, 4]).flatmap(lambda size: st.lists(counts, min_size=size, max_size=size)))
    num_tokens = min(each for each in NUM_TOKENS if each >= sum(new for _, new in of_seqs))
    return of_seqs, draw(st.sampled_from([2, 4, 8])), num_tokens


def seen(table, lens, cu):
    """Places in the pool that each token sees, by the meaning of a row of paged attention."""
    found = []
    for row, length in enumerate(lens):
        for place in range(cu[row], cu[row + 1]):
            last = length - (cu[row + 1] - place)
            found.append([int(table[row, position // PAGE]) * PAGE + position % PAGE for position in range(last + 1)])
    return found


@settings(max_examples=300)
@given(steps())
@example(([(7, 2)] * 4, 8, 8))  # as many chunks as a step can have
def test_a_token_sees_its_chunk_up_to_itself(step):
    counts, chunk, num_tokens = step
    table = np.arange(len(counts) * PAGES, dtype=np.int32).reshape(len(counts), PAGES)
    new = np.array([each for _, each in counts])
    lens = np.array([before + each if each else 0 for before, each in counts], np.int32)
    cu = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    expected = [
        [int(table[row, at // PAGE]) * PAGE + at % PAGE for at in range(position // chunk * chunk, position + 1)]
        for row, (before, each) in enumerate(counts)
        for position in range(before, before + each)
    ]
    rows = [np.asarray(x) for x in STEP(table, lens, cu, num_tokens, chunk, PAGE)]
    assert rows[0].shape[1] == chunk // PAGE
    assert (np.diff(rows[2]) >= 0).all() and rows[2][-1] == cu[-1]
    assert seen(*rows) == expected


@given(st.lists(st.integers(0, PAGE * PAGES), min_size=4, max_size=4), st.sampled_from([2, 4, 8]))
def test_a_new_token_sees_its_chunk(lens, chunk):
    lens = np.array(lens, np.int32)
    table = np.arange(len(lens) * PAGES, dtype=np.int32).reshape(len(lens), PAGES)
    own, kept = map(np.asarray, DECODE(table, lens, chunk, PAGE))
    for row, length in enumerate(lens):
        begin = max(length - 1, 0) // chunk * chunk
        assert kept[row] == length - begin
        needed = -(-kept[row] // PAGE)
        assert own[row, :needed].tolist() == table[row, begin // PAGE :][:needed].tolist()
