"""Random mixes of requests on an engine that speculates: the tokens of one that does not, whatever moves them."""

import dataclasses
import random

import pytest
import torch
from engine_models import VOCAB_SIZE, tiny_model
from speculation_requests import joined, repeating_prompts, request
from thorough import thorough

from torchax_serve import EngineOptions, serve

SIZES = EngineOptions(
    max_model_len=96, max_num_seqs=4, page_size=4, max_num_batched_tokens=24, max_num_steps=4, batch_invariant=True
)
NUM_PAGES = 52
"""Two requests of the longest length and a bit: of four, the later ones are preempted."""

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
OPTIONS = (
    {},
    {"temperature": 0.6, "do_sample": True},
    {"temperature": 1.0, "top_p": 0.8, "do_sample": True, "logprobs": 1},
    {"logprobs": 2},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"min_new_tokens": 5, "eos_token_id": 7},
    {"speculate": False},
)


def mix(rng, number):
    """Returns requests of all kinds; some prompts are longer than a step, some answers as long as they can be."""
    asked = []
    for index, prompt in enumerate(repeating_prompts(number, seed=rng.randrange(1000))):
        options = dict(OPTIONS[index % len(OPTIONS)])
        if rng.random() < 0.4:
            options["stop_token_ids"] = [rng.randrange(VOCAB_SIZE) for _ in range(3)]
        if rng.random() < 0.3:
            options["priority"] = rng.randrange(-1, 2)
        length = rng.choice([1, 5, 16, 17, 40, 90])
        asked.append(request((prompt * 8)[:length], rng.choice([1, 3, 30, 80]), seed=index, **options))
    return asked


def answers_with_early_ends(model, asked, rng):
    """Submits requests one after the other, some with a deadline, and cancels some after a few tokens.

    Returns tokens and log-probabilities of each request, and the reason of its end.
    """
    handles, outputs = [], []
    for each in asked:
        if rng.random() < 0.15:
            given = dataclasses.replace(each.params.given, timeout_s=0.2 * rng.random())
            each = dataclasses.replace(each, params=dataclasses.replace(each.params, given=given))
        handles.append(model.engine.submit(each))
        outputs.append([])
        if rng.random() < 0.4:  # arrivals are spread over the steps
            index = rng.randrange(len(handles))
            outputs[index] += [out for _, out in zip(range(1), handles[index], strict=False)]
    for index in rng.sample(range(len(asked)), len(asked) // 5):
        outputs[index] += [out for _, out in zip(range(rng.randrange(4)), handles[index], strict=False)]
        handles[index].cancel()
    for handle, before in zip(handles, outputs, strict=True):
        before.extend(handle)
    return [(*joined(outs), handle.finish_reason) for outs, handle in zip(outputs, handles, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "method"),
    [(torch.float32, "ngram"), thorough(torch.bfloat16, "draft_model"), thorough(torch.float32, "draft_model")],
    ids=["ngram-float32", "draft_model-bfloat16", "draft_model-float32"],
)
def test_tokens_do_not_depend_on_what_ends_or_moves_requests(dtype, method):
    config = NGRAM | {"method": method}
    if method == "draft_model":
        config["model"] = tiny_model("llama", dtype)
    with serve(tiny_model("qwen3", dtype), engine=SIZES) as plain:
        mixes = [mix(random.Random(seed), 21) for seed in range(3)]
        wanted = [[joined(list(handle)) for handle in plain.engine.submit_all(each)] for each in mixes]
        plan = plain.engine._runner._cache.plan
    few = NUM_PAGES * sum(shape.page_bytes(plan.page_size) for shape in plan.shapes)
    options = dataclasses.replace(SIZES, kv_cache_memory_bytes=few, speculative=config)
    with serve(tiny_model("qwen3", dtype), engine=options) as model:
        model.engine.check_integrity = True
        reasons = set()
        for seed, (asked, whole) in enumerate(zip(mixes, wanted, strict=True)):
            answers = answers_with_early_ends(model, asked, random.Random(seed))
            for (tokens, logprobs, reason), (all_tokens, all_logprobs) in zip(answers, whole, strict=True):
                is_early = reason in ("abort", "deadline")
                reasons.add(reason)
                assert (tokens, logprobs) == (all_tokens[: len(tokens)], all_logprobs[: len(logprobs)])
                assert is_early or tokens == all_tokens
        stats = model.engine.call(lambda scheduler, runner: scheduler.stats(), when_idle=True)
        assert reasons >= {"abort", "length", "stop"}
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens and stats.num_preemptions > 0
        assert [group.num_used for group in stats.pages] == [0]
