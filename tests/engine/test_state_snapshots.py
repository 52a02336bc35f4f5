"""Prefixes of models with recurrent layers: found again with the tokens of eager PyTorch, and not computed twice."""

import contextlib
import dataclasses

import numpy as np
import pytest
from test_recurrent_layers import KEPT, OPTIONS, eager_tokens, prompts, tiny, tokens
from thorough import except_for

from torchax_serve import EngineOptions, InvalidArgumentError, serve

LONG = dataclasses.replace(OPTIONS, max_model_len=200)


@contextlib.contextmanager
def served(model_type, options=LONG):
    """A model whose engine checks after each step that no snapshot and no page is lost."""
    with serve(tiny(model_type), engine=options) as model:
        model.engine.check_integrity = True
        yield model


def hits(model):
    return model.stats().scheduler.num_hit_tokens


@pytest.mark.parametrize("model_type", except_for(KEPT[:3], KEPT))
def test_a_conversation_computes_what_is_new(model_type):
    """Turns alone, and beside other conversations, in chunks of at most 20 tokens."""
    eager = tiny(model_type)
    first, second, other = prompts(70, 9, 61)
    answer = eager_tokens(eager, first)
    turn = first + answer + second
    with served(model_type) as model:
        assert tokens(model, [first]) == [answer]
        assert tokens(model, [other, turn, first]) == [eager_tokens(eager, each) for each in (other, turn, first)]
        assert hits(model) == 2 * 56
        computed = model.stats().scheduler.num_prompt_tokens - hits(model) - len(first) - len(other)
        assert computed == len(turn) - 56 + len(first) - 56


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba"])
def test_the_third_prompt_of_a_shared_beginning_finds_it(model_type):
    eager = tiny(model_type)
    shared, *ends = prompts(50, 40, 33, 41)
    with served(model_type) as model:
        found = [hits(model)]
        for end in ends:
            assert tokens(model, [shared + end]) == [eager_tokens(eager, shared + end)]
            found.append(hits(model))
    assert found == [0, 0, 0, 48]


def test_host_memory_for_too_little_is_refused():
    options = dataclasses.replace(LONG, kv_offloading_bytes=100)
    refused = pytest.raises(
        InvalidArgumentError, match=r"expected 0 or at least \d+, two pages of each layer and a rec"
    )
    with refused, served("qwen3_5_text", options) as model:
        tokens(model, [[5]])


def test_without_room_for_a_snapshot_nothing_is_shared():
    eager, (ids,) = tiny("mamba"), prompts(40)
    with served("mamba", OPTIONS) as model:
        states = model.engine._runner._cache.recurrent.num_bytes(1)
    bare = dataclasses.replace(OPTIONS, kv_cache_memory_bytes=(OPTIONS.max_num_seqs + 1) * states)
    with served("mamba", bare) as model:
        assert [tokens(model, [ids])[0] for _ in range(2)] == [eager_tokens(eager, ids)] * 2
        assert hits(model) == 0


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_pages_in_8_bits_beside_states_in_full(dtype):
    """The tokens of the same model without a cache of prefixes, and on pages that are as small as they are said to."""
    first, second = prompts(70, 9)
    options = EngineOptions(**dataclasses.asdict(LONG) | {"kv_cache_dtype": dtype})
    alone = dataclasses.replace(options, enable_prefix_caching=False)
    with served("qwen3_5_text", alone) as model:
        expected = tokens(model, [first])[0], tokens(model, [first + second])[0]
    with served("qwen3_5_text", options) as model:
        assert (tokens(model, [first])[0], tokens(model, [first + second])[0]) == expected
        assert hits(model) == 56
        assert "per-sequence" not in model.engine.description
        pages, *states = model.engine._runner._cache.pools
        assert np.dtype(pages.pages.dtype).itemsize == 1
        assert all(str(state.dtype) == "float32" for state in states)
