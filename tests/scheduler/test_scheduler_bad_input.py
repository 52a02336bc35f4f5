"""What nobody can honour is refused in one line that says what was expected, what came, and what to do."""

import math

import numpy as np
import pytest
from scheduler_device import make_config, make_loop, request, truth

from torchax_serve import InvalidArgumentError
from torchax_serve.scheduler import CacheGroup, Request, Scheduler, SchedulerConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids: expected a non-empty list of token ids >= 0, got"),
        ({"prompt_ids": [1, -1]}, r"token ids >= 0, got \[1, -1\]; tokenize"),
        ({"prompt_ids": [1.0]}, "token ids"),
        ({"prompt_ids": [True]}, "token ids"),
        ({"prompt_ids": "text"}, "token ids"),
        ({"prompt_ids": np.array([1])}, "token ids"),
        ({"prompt_ids": [-1] * 20}, "and 12 more"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number >= 1, got 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"min_new_tokens": 6}, "min_new_tokens: expected at most max_new_tokens=5, got 6"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"priority": 0.5}, "priority"),
        ({"deadline_s": math.nan}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"queue_deadline_s": math.nan}, "queue_deadline_s"),
        ({"stop_ids": [1]}, "stop_ids"),
        ({"salt": None}, "salt"),
        ({"cache_prompt": 1}, "cache_prompt"),
        ({"request_id": None}, "request_id"),
        ({"request_id": True}, "request_id"),
    ],
)
def test_requests_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Request(**({"request_id": 1, "prompt_ids": [1, 2], "max_new_tokens": 5} | options))


@pytest.mark.parametrize(
    ("groups", "prompt_len", "message"),
    [
        (
            (CacheGroup("full", None, 5),),
            16,
            "got 16 tokens, which need 5 pages of 4 tokens in group 'full', which has 4 beside the null page",
        ),
        ((CacheGroup("full", None, 5), CacheGroup("w", 9, 3)), 11, "3 pages of 4 tokens in group 'w'"),
        ((CacheGroup("full", None, 99),), 64, "expected a prompt of at most 63 tokens, .*, got 64; shorten the prompt"),
    ],
)
def test_a_request_that_can_never_fit_is_refused(groups, prompt_len, message):
    scheduler = Scheduler(make_config(*groups))
    with pytest.raises(InvalidArgumentError, match=message):
        scheduler.add(request(0, prompt_len=prompt_len))
    assert len(scheduler) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size: expected a whole number >= 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 2.0}, "max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_num_batched_tokens": 6}, "max_num_batched_tokens: expected at least 7, .*, got 6"),
        ({"min_prefill_chunk": 0}, "min_prefill_chunk"),
        ({"max_rows_per_step": 0}, "max_rows_per_step"),
        ({"max_num_steps": 0}, "max_num_steps"),
        ({"max_fused_decode_s": 0}, "max_fused_decode_s"),
        ({"max_decode_slowdown": 1}, "max_decode_slowdown"),
        ({"max_decode_slowdown": math.nan}, "max_decode_slowdown"),
        ({"max_decode_slowdown": math.inf}, "max_decode_slowdown"),
        ({"ttft_target_s": 0}, "ttft_target_s"),
        ({"tpot_target_s": math.inf}, "tpot_target_s"),
        ({"allowed_chunk_sizes": (4, 2)}, "descend to 1"),
        ({"allowed_chunk_sizes": (1, 4)}, "descend to 1"),
        (
            {"allowed_chunk_sizes": (8, 2, 1)},
            r"min_prefill_chunk: expected one of allowed_chunk_sizes=\(8, 2, 1\), got 4",
        ),
        ({"allowed_chunk_sizes": ()}, "descend to 1"),
        ({"batches_prefill": None}, "batches_prefill"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
        ({"groups": [CacheGroup("full", None, 9)]}, "a tuple of CacheGroup"),
        ({"groups": (CacheGroup("a", None, 9), CacheGroup("a", 4, 9))}, "one name for each group"),
    ],
)
def test_configurations_out_of_range_are_refused(options, message):
    defaults = {
        "groups": (),
        "page_size": 4,
        "max_num_seqs": 4,
        "max_model_len": 64,
        "max_num_batched_tokens": 32,
        "min_prefill_chunk": 4,
    }
    with pytest.raises(InvalidArgumentError, match=message):
        SchedulerConfig(**(defaults | options))


def test_zero_pages_and_windows_of_nothing_are_refused():
    for num_pages in (0, 1):
        with pytest.raises(InvalidArgumentError, match=f"num_pages: expected a whole number >= 2, got {num_pages}"):
            CacheGroup("full", None, num_pages)
    with pytest.raises(InvalidArgumentError, match="window: expected a whole number >= 1, got 0"):
        CacheGroup("full", 0, 9)


def test_forks_of_nobody_or_of_another_prompt_are_refused():
    scheduler = Scheduler(make_config())
    scheduler.add(Request(request_id=0, prompt_ids=[1, 2], max_new_tokens=1))
    for options in ({"fork_of": 5}, {"fork_of": 0, "prompt_ids": [1, 3]}, {"fork_of": 0, "salt": "x"}):
        with pytest.raises(
            InvalidArgumentError, match="fork_of: expected a live request with the same prompt and salt"
        ):
            scheduler.add(Request(**({"request_id": 1, "prompt_ids": [1, 2], "max_new_tokens": 1} | options)))
    assert len(scheduler) == 1


def test_commits_out_of_order_or_of_another_shape_change_nothing():
    loop = make_loop(depth=2)
    loop.scheduler.add(request(0))
    loop.schedule()
    loop.schedule()
    (first, sampled), (second, _) = loop.flights
    with pytest.raises(InvalidArgumentError, match=r"plan: expected the oldest in flight \(step 0\), got 'step 1'"):
        loop.scheduler.commit(second, [[1]], 0.0)
    for tokens in ([], [[1, 2]], [[0.5]], [1, 2]):
        with pytest.raises(InvalidArgumentError, match=r"tokens: expected whole numbers of shape \(1, 1\)"):
            loop.scheduler.commit(first, tokens, 0.0)
    for duration_s in (-1.0, math.nan):
        with pytest.raises(InvalidArgumentError, match="duration_s"):
            loop.scheduler.commit(first, sampled, 0.0, duration_s)
    loop.drain()
    assert loop.tokens[0] == truth(loop, request(0))
    with pytest.raises(InvalidArgumentError, match=r"oldest in flight \(none\)"):
        loop.scheduler.commit(first, sampled, 0.0)
