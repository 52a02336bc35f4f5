"""What the host tells a decode step in few numbers is what it tells any packed step in many."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_adapters.caches.packed_batch import PagedLayout
from torchax_serve.executors.step_inputs import SAMPLED_ON_DEVICE, PackedDecodeSpec, PackedStepSpec
from torchax_serve.scheduler import PlanRow

NUM_SLOTS, PAGES = 8, 3


@functools.partial(jax.jit, static_argnums=0)
def unpacked(spec, numbers, *last_tokens):
    """As a step does: in one program of a spec, not one of each operation."""
    return spec.unpack(numbers, *last_tokens)


@given(
    chosen=st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, min_size=1),
    data=st.data(),
    num_groups=st.integers(1, 2),
    num_steps=st.integers(1, 16),
    draws=st.booleans(),
)
def test_a_decode_call_says_the_same_batch(chosen, data, num_groups, num_steps, draws):
    num_rows = data.draw(st.integers(len(chosen), NUM_SLOTS))
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=len(chosen), max_size=len(chosen)))
    ids = data.draw(st.lists(st.none() | st.tuples(st.integers(0, 99)), min_size=len(chosen), max_size=len(chosen)))
    placed = zip(chosen, lengths, ids, strict=True)
    rows = [PlanRow(f"r{slot}", slot, start, 1, given, True) for slot, start, given in placed]
    tables = [np.random.default_rng(i).integers(0, 99, (NUM_SLOTS, PAGES), np.int32) for i in range(num_groups)]
    layout = PagedLayout(tuple(range(num_groups)), (None,) * num_groups, 48, is_decode=True)
    packed = PackedStepSpec(num_rows, num_rows, PAGES, layout, False)
    last_tokens = np.arange(100, 100 + NUM_SLOTS, dtype=np.int32)
    whole = unpacked(packed, packed.pack(rows, tables, 0), last_tokens)
    spec = PackedDecodeSpec(packed, 16)
    numbers = spec.pack(rows, tables, num_steps=num_steps, draws=draws)
    assert len(numbers) == spec.size
    batch, slots, told_steps, told_draws = unpacked(spec, numbers)
    assert (int(told_steps), bool(told_draws)) == (num_steps, draws)
    np.testing.assert_array_equal(slots[: len(rows)], chosen)
    token_ids = np.asarray(batch.token_ids)
    is_on_device = token_ids == SAMPLED_ON_DEVICE
    batch = dataclasses.replace(batch, token_ids=np.where(is_on_device, last_tokens[np.asarray(slots)], token_ids))
    jax.tree.map(np.testing.assert_array_equal, batch, whole)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_packed_run_counts_every_row_on(ahead):
    rows = [PlanRow("a", 2, 5, 1, None, True), PlanRow("b", 0, 7, 3, (11, 12, 13), False)]
    packed = PackedStepSpec(6, 3, PAGES, PagedLayout((0,), (None,), 48), False)
    table = np.arange(NUM_SLOTS * PAGES, dtype=np.int32).reshape(NUM_SLOTS, PAGES)
    batch = unpacked(packed, packed.pack(rows, [table], ahead), np.full(NUM_SLOTS, 77, np.int32))
    np.testing.assert_array_equal(batch.token_ids, [77, 11, 12, 13, 13, 13])
    np.testing.assert_array_equal(batch.positions, [5 + ahead, 7 + ahead, 8 + ahead, *[9 + ahead] * 3])
    np.testing.assert_array_equal(batch.cu_q_lens, [0, 1, 4, 4])
    np.testing.assert_array_equal(batch.kv_lens, [6 + ahead, 10 + ahead, 0])
    np.testing.assert_array_equal(batch.last, [0, 3, 3])
    np.testing.assert_array_equal(batch.page_tables[0], [table[2], table[0], [0] * PAGES])
