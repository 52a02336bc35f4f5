"""The engine against transformers: every request gets the tokens it gets alone, whatever runs beside it."""

import asyncio
import dataclasses
import random
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import psutil
import pytest
import torch
import transformers
from engine_models import VOCAB_SIZE, expected_tokens, tiny_model
from engine_requests import engine_request
from steps_taken import steps_taken
from thorough import thorough
from threads import at_once

from model_adapters.errors import InvalidArgumentError, OutOfMemoryError, TorchaxServeError
from torchax_serve import EngineOptions, RequestError, SamplingParams, serve
from torchax_serve.executors.packed.executor import PackedExecutor
from torchax_serve.kv_cache import memory
from torchax_serve.sampling.sampler import tables_bytes
from torchax_serve.scheduler.scheduler import Scheduler

SMALL = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_batched_tokens=32)


def request(prompt, max_new_tokens=8, seed=0, params=None, **config):
    params = params or SamplingParams()
    return engine_request(
        prompt,
        params.merged_into(transformers.GenerationConfig(max_new_tokens=max_new_tokens, **config)),
        params,
        seed=seed,
    )


def random_prompt(rng, longest=40):
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))]


@pytest.fixture(scope="module")
def llama():
    with serve(tiny_model("llama"), engine=SMALL) as model:
        model.engine.check_integrity = True
        yield model


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", thorough("gpt2"), thorough("opt"), "mixtral"])
def test_requests_get_the_tokens_they_get_alone(name):
    rng = random.Random(name)
    with serve(tiny_model(name), engine=SMALL) as model:
        model.engine.check_integrity = True
        prompts = [random_prompt(rng) for _ in range(10)] + [[5], [6] * 8, [7] * 32, [8] * 56]
        handles = [model.engine.submit(request(prompt)) for prompt in prompts]
        assert [handle.result() for handle in handles] == [expected_tokens(name, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("max_model_len", [thorough(6), 8, thorough(12)])  # its sliding window is 8 tokens
def test_a_window_as_long_as_the_longest_request_is_packed(max_model_len):
    options = EngineOptions(max_model_len=max_model_len, max_num_seqs=2, page_size=4, max_num_batched_tokens=8)
    with serve(tiny_model("gemma3_text"), engine=options) as model:
        assert "not packed" not in model.engine.description
        prompts = [[5, 6, 7], [8] * (max_model_len - 3)]
        handles = [model.engine.submit(request(prompt, 3)) for prompt in prompts]
        assert [handle.result() for handle in handles] == [
            expected_tokens("gemma3_text", prompt, 3) for prompt in prompts
        ]


def test_requests_submitted_together_share_every_step(llama):
    prompts = [[first, 9, 8, 7, 6] for first in (10, 11, 12, 13)]
    begun = steps_taken(llama)
    llama.engine.submit(request([14, 9, 8, 7, 6])).result()
    num_steps_alone = steps_taken(llama) - begun
    handles = llama.engine.submit_all([request(prompt) for prompt in prompts])
    assert [handle.result() for handle in handles] == [expected_tokens("llama", prompt, 8) for prompt in prompts]
    assert steps_taken(llama) - begun == 2 * num_steps_alone


def test_of_requests_submitted_together_all_are_taken_or_none(llama):
    before = llama.stats().scheduler
    with pytest.raises(InvalidArgumentError, match="a prompt of at most 63 tokens"):
        llama.engine.submit_all([request([5, 6]), request([5] * 64)])
    assert llama.engine.submit_all([]) == []
    llama.engine.submit(request([7], 1)).result()
    after = llama.stats().scheduler
    assert after.num_prompt_tokens == before.num_prompt_tokens + 1


@pytest.mark.parametrize("num_requests", [400, thorough(2000)])
def test_many_requests_a_third_of_them_aborted_with_few_pages(num_requests):
    """Every finished request is token-exact, and all pages are back at the end."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, 30) for _ in range(60)]
    prompts += [prompts[0][:16] + prompt[:8] for prompt in prompts[:20]]  # with a common beginning
    options = EngineOptions(
        max_model_len=48, max_num_seqs=6, page_size=4, max_num_batched_tokens=24, kv_cache_memory_bytes=24 * 1024
    )
    with serve(tiny_model("llama"), engine=options) as model:
        engine = model.engine
        engine.check_integrity = True
        cases = [(rng.choice(prompts), rng.randint(1, 12), rng.random() < 1 / 3) for _ in range(num_requests)]
        waiting = []
        for prompt, length, is_aborted in cases:
            handle = engine.submit(request(prompt, length))
            waiting.append(handle)
            if is_aborted:
                threading.Timer(rng.random() * 0.5, handle.cancel).start() if rng.random() < 0.2 else handle.cancel()
            if len(waiting) % 64 == 0:
                for earlier in waiting[-64:-48]:
                    earlier.result()
        num_whole = 0
        for handle, (prompt, length, is_aborted) in zip(waiting, cases, strict=True):
            tokens = handle.result()
            expected = expected_tokens("llama", prompt, 12)[:length]
            assert tokens == expected[: len(tokens)]
            assert is_aborted or tokens == expected
            num_whole += tokens == expected
        stats = engine.stats().scheduler
        assert num_whole >= 0.65 * num_requests
        assert stats.num_preemptions > 0
        assert stats.num_hit_tokens > 0
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        deadline = time.monotonic() + 10
        while any(group.num_used for group in engine.stats().scheduler.pages) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [group.num_used for group in engine.stats().scheduler.pages] == [0]


def test_nothing_is_compiled_behind_the_warm_up():
    rng = random.Random(2)
    with serve(tiny_model("llama"), engine=SMALL) as model:
        engine = model.engine
        engine.warm_up()
        before = engine.stats().num_programs
        kinds = [
            {},
            {"do_sample": True, "temperature": 0.7},
            {"do_sample": True, "top_k": 5, "top_p": 0.8},
            {"repetition_penalty": 1.3},
            {"min_new_tokens": 3, "eos_token_id": 9},
        ]
        asked = [None, SamplingParams(presence_penalty=0.5), SamplingParams(logprobs=3)]
        handles = [
            engine.submit(request(random_prompt(rng), rng.randint(1, 9), i, rng.choice(asked), **rng.choice(kinds)))
            for i in range(200)
        ]
        for handle in handles:
            handle.result()
        assert engine.stats().num_programs == before


def test_a_seeded_request_draws_the_same_tokens_alone_among_others_and_behind_a_prefix_hit(llama):
    rng = random.Random(3)
    prompt = random_prompt(rng, 30) + [4] * 10
    drawn = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    alone = llama.engine.submit(request(prompt, 12, seed=77, **drawn)).result()
    hits = llama.stats().scheduler.num_hit_tokens
    others = [llama.engine.submit(request(random_prompt(rng), 12, i, **drawn)) for i in range(6)]
    among = llama.engine.submit(request(prompt, 12, seed=77, **drawn)).result()
    assert among == alone
    assert llama.stats().scheduler.num_hit_tokens > hits
    for other in others:
        other.result()
    other_seed = llama.engine.submit(request(prompt, 12, seed=78, **drawn)).result()
    assert other_seed != alone


def test_log_probabilities_are_those_of_the_models_logits(llama):
    rng = random.Random(4)
    prompt = random_prompt(rng, 30)
    params = SamplingParams(logprobs=3, prompt_logprobs=2)
    handle = llama.engine.submit(request(prompt, 5, params=params))
    arrivals = list(handle)
    tokens = handle.token_ids
    with torch.no_grad():
        logits = tiny_model("llama")(torch.tensor([prompt + tokens])).logits[0]
    expected = torch.log_softmax(logits.float(), -1)
    found = [each for new in arrivals for each in new.logprobs]
    prompt_found = next(new.prompt_logprobs for new in arrivals if new.prompt_logprobs)
    assert prompt_found[0] is None
    everything = [*prompt_found[1:], *found]
    assert [each.token_id for each in everything] == [*prompt[1:], *tokens]
    for position, (each, num_top) in enumerate(
        zip(everything, [2] * (len(prompt) - 1) + [3] * len(tokens), strict=True)
    ):
        assert each.logprob == pytest.approx(float(expected[position, each.token_id]), abs=1e-4)
        best = expected[position].topk(num_top)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "options", [thorough({}), {"temperature": 1.2, "top_k": 20}, thorough({"repetition_penalty": 1.2})]
)
def test_several_steps_in_one_dispatch_give_the_same_tokens(options):
    """Greedy and drawn rows side by side, and rows whose tables the program of several steps has not."""
    rng = random.Random(5)
    prompts = [random_prompt(rng) for _ in range(4)]
    several, single = (dataclasses.replace(SMALL, max_num_steps=num_steps) for num_steps in (4, 1))
    drawn = {"do_sample": True, **options} if options else {}
    with serve(tiny_model("llama"), engine=several) as many, serve(tiny_model("llama"), engine=single) as one:
        model, sent = many.engine._runner._executor, []
        run_decode = model.run_decode
        model.run_decode = lambda plan, *args: sent.append(plan.num_steps) or run_decode(plan, *args)
        many.engine.submit(request(prompts[0], 13, 9, **drawn)).result()  # in single steps, until the program is there
        model._step_programs._background.wait()
        handles = [[m.engine.submit(request(p, 13, 9, **drawn)) for p in prompts] for m in (many, one)]
        greedy = many.engine.submit(request(prompts[0], 13))
        assert [t.result() for t in handles[0]] == [t.result() for t in handles[1]]
        assert greedy.result() == expected_tokens("llama", prompts[0], 13)
        assert max(sent) == 4


def test_a_step_that_raises_fails_its_requests_and_no_others(llama, monkeypatch):
    engine = llama.engine
    model = engine._runner._executor
    calls = []

    def failing(step):
        def counted(*args, **kwargs):
            calls.append(step)
            if len(calls) == 3:
                raise RuntimeError("the device has caught fire")
            return step(*args, **kwargs)

        return counted

    monkeypatch.setattr(model, "run", failing(model.run))
    monkeypatch.setattr(model, "run_decode", failing(model.run_decode))
    first = engine.submit(request([5, 6, 7], 20))
    with pytest.raises(RequestError, match=r"its step failed \(RuntimeError: the device has caught fire\)"):
        first.result()
    assert engine.submit(request([5, 6, 7], 6)).result() == expected_tokens("llama", [5, 6, 7], 6)


def test_a_step_that_takes_the_cache_with_it(llama, monkeypatch):
    engine = llama.engine
    prompt = [9, 8, 7, 6, 5, 4, 3, 9, 8, 7]
    assert engine.submit(request(prompt, 3)).result() == expected_tokens("llama", prompt, 3)  # its prefix is kept
    model = engine._runner._executor
    run = model.run

    def failing(*args, **kwargs):
        monkeypatch.setattr(model, "run", run)
        for pool in engine._runner._cache.pools:
            pool.delete()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "run", failing)
    with pytest.raises(RequestError, match="out of memory"):
        engine.submit(request(prompt, 6)).result()
    assert engine.submit(request(prompt, 6)).result() == expected_tokens("llama", prompt, 6)


def test_logits_that_are_not_numbers_fail_their_request_alone():
    module = tiny_model("llama")
    with torch.no_grad():
        module.get_input_embeddings().weight[50] = float("nan")
    with serve(module, engine=SMALL) as model:
        good = [request([5, 6, 7], 12), request([7, 8], 12)]
        handles = [model.engine.submit(each) for each in (good[0], request([3, 50, 4], 12), good[1])]
        with pytest.raises(RequestError, match=r"logits were not finite numbers; .* better served in bfloat16"):
            handles[1].result()
        assert [handles[0].result(), handles[2].result()] == [
            expected_tokens("llama", [5, 6, 7], 12),
            expected_tokens("llama", [7, 8], 12),
        ]


def test_nobody_is_held_up_by_a_ticket_that_nobody_reads(llama):
    unread = llama.engine.submit(request([3, 4], 30))
    assert llama.engine.submit(request([5, 6], 6)).result() == expected_tokens("llama", [5, 6], 6)
    assert unread.result() == expected_tokens("llama", [3, 4], 30)


def test_cancelling_twice_and_behind_the_end(llama):
    with llama.engine._wake:  # its thread takes all three orders together
        handle = llama.engine.submit(request([3, 4], 40))
        handle.cancel()
        handle.cancel()
    assert len(handle.result()) < 40
    assert handle.finish_reason == "abort"
    handle.cancel()


def test_a_request_ends_when_its_time_is_up(llama):
    handle = llama.engine.submit(request([3, 4], 60, params=SamplingParams(timeout_s=1e-6)))
    handle.result()
    assert handle.finish_reason == "deadline"


def test_the_only_request_ends_when_its_time_is_up_in_a_step(llama, monkeypatch):
    """Nothing runs behind that step, so that it has to say itself that the request has ended."""
    read = llama.engine._runner.read

    def slow(step):
        time.sleep(0.3)
        return read(step)

    monkeypatch.setattr("torchax_serve.engine.engine.MAX_IN_FLIGHT", 1)
    monkeypatch.setattr(llama.engine._runner, "read", slow)
    handle = llama.engine.submit(request([3, 4], 60, params=SamplingParams(timeout_s=0.2)))
    thread = threading.Thread(target=handle.result, daemon=True)
    thread.start()
    thread.join(20)
    assert handle.finish_reason == "deadline" and len(handle.token_ids) == 1


def test_the_time_for_waiting_ends_requests_that_have_not_begun(llama):
    running = [llama.engine.submit(request([3, 4 + i], 40)) for i in range(4)]  # in all slots
    waiting = llama.engine.submit(request([5, 6], 4, params=SamplingParams(queue_timeout_s=1e-6)))
    patient = llama.engine.submit(request([5, 6], 4, params=SamplingParams(queue_timeout_s=600)))
    assert (waiting.result(), waiting.finish_reason) == ([], "queue_deadline")
    assert (patient.result(), patient.finish_reason) == (expected_tokens("llama", [5, 6], 4), "length")
    assert [handle.result() for handle in running] == [expected_tokens("llama", [3, 4 + i], 40) for i in range(4)]


def test_a_stream_says_that_it_has_waited_too_long(llama):
    answer = llama.stream([5, 6], SamplingParams(max_new_tokens=4, queue_timeout_s=1e-6))
    assert "".join(answer) == ""
    assert (answer.token_ids, answer.stats.finish_reason) == ([], "queue_deadline")


@pytest.mark.parametrize(
    ("options", "prompt", "new", "message"),
    [
        (SMALL, [5] * 64, 1, "64"),
        (
            EngineOptions(max_model_len=64, max_num_seqs=2, page_size=8, kv_cache_memory_bytes=4 * 2048),
            [5] * 40,
            4,
            "pages",
        ),
    ],
)
def test_requests_that_can_never_run(options, prompt, new, message):
    with serve(tiny_model("llama"), engine=options) as model:
        with pytest.raises(InvalidArgumentError, match=message):
            model.engine.submit(request(prompt, new))
        assert model.engine.submit(request([5], 3)).result() == expected_tokens("llama", [5], 3)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"page_size": 0}, "page_size: expected a whole number >= 1, got 0"),
        ({"max_num_seqs": -1}, "max_num_seqs: expected a whole number >= 1"),
        ({"max_model_len": 1.5}, "max_model_len: expected a whole number >= 1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes: expected a whole number >= 1"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching: expected True or False"),
        ({"batch_invariant": 1}, "batch_invariant: expected True or False"),
        ({"max_decode_slowdown": 1}, "max_decode_slowdown: expected a number above 1, got 1"),
    ],
)
def test_options_out_of_their_range(kwargs, message):
    with pytest.raises(InvalidArgumentError, match=message):
        EngineOptions(**kwargs)


def test_batch_invariant_bfloat16_has_the_same_logprobs_alone_and_in_company():
    options = dataclasses.replace(SMALL, batch_invariant=True, enable_prefix_caching=False)
    rng = random.Random(3)
    requests = [request(random_prompt(rng), params=SamplingParams(logprobs=2)) for _ in range(4)]

    def logprobs(handle):
        return [each for new in handle for each in new.logprobs]

    wide = transformers.LlamaConfig(  # sums short enough have but one order
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    with serve(transformers.LlamaForCausalLM(wide).bfloat16(), engine=options) as model:
        alone = [logprobs(model.engine.submit(each)) for each in requests]
        handles = [model.engine.submit(each) for each in requests]
        assert [logprobs(handle) for handle in handles] == alone


def test_batch_invariance_is_refused_where_it_does_not_hold():
    with (
        serve(tiny_model("bloom"), engine=EngineOptions(max_model_len=64, batch_invariant=True)) as model,
        pytest.raises(InvalidArgumentError, match="batch_invariant: expected a model that runs packed"),
    ):
        model.engine.stats()


def test_no_room_for_a_page():
    options = EngineOptions(max_model_len=64, page_size=8, kv_cache_memory_bytes=100)
    with (
        serve(tiny_model("llama"), engine=options) as model,
        pytest.raises(InvalidArgumentError, match="kv_cache_memory_bytes"),
    ):
        model.engine.stats()


@pytest.mark.parametrize("budget", [10_000, 100_000, 1_234_567])
def test_pages_take_the_budget_that_was_asked_for(budget):
    for name in ("llama", "gemma3_text"):
        options = EngineOptions(max_model_len=64, page_size=4, kv_cache_memory_bytes=budget)
        with serve(tiny_model(name), engine=options) as model:
            taken = sum(pool.nbytes for pool in model.engine._runner._cache.pools)
            page = max(pool.nbytes // pool.shape[0] for pool in model.engine._runner._cache.pools)
            assert budget - 2 * page <= taken <= budget


def test_the_samplers_tables_are_part_of_what_the_engine_takes(monkeypatch):
    tables = tables_bytes(4, VOCAB_SIZE, SMALL.max_model_len)
    monkeypatch.setattr(memory, "free_bytes", lambda: tables + 8 * 2048)  # eight pages
    monkeypatch.setattr(PackedExecutor, "temporary_bytes", lambda self: 0)
    with serve(tiny_model("llama"), engine=SMALL) as model:
        runner = model.engine._runner
        assert sum(pool.nbytes for pool in runner._cache.pools) == 8 * 2048
        assert f"{tables / 1e6:.1f} MB for the sampler's tables" in model.engine.description
        model.engine.submit(request([5, 6], 2, params=SamplingParams(presence_penalty=0.5))).result()
        state = runner._sampler.state
        assert sum(array.nbytes for array in jax.tree.leaves((state.tables, state.history))) == tables
    monkeypatch.setattr(memory, "free_bytes", lambda: tables)
    with (
        serve(tiny_model("llama"), engine=SMALL) as model,
        pytest.raises(
            OutOfMemoryError,
            match=f"sampler's tables of 4 requests, {tables} bytes, got {tables} bytes; lower max_num_seqs",
        ),
    ):
        model.engine.stats()


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_nearly_the_same_free_memory_gives_the_same_programs(name, monkeypatch):
    """Pools of another size are other programs: two starts on one host, of which little changes, must share them."""
    monkeypatch.setattr(PackedExecutor, "temporary_bytes", lambda self: 5000)
    many = dataclasses.replace(SMALL, max_num_seqs=400, max_model_len=128)  # which could use more than there is
    shapes, tables = set(), tables_bytes(400, VOCAB_SIZE, 128)
    for left in (800_000, 850_000, 910_000):
        monkeypatch.setattr(memory, "free_bytes", lambda left=left + tables: left + 5000)
        with serve(tiny_model(name), engine=many) as model:
            pools = model.engine._runner._cache.pools
            assert 0.8 * left - 5000 <= sum(pool.nbytes for pool in pools) <= left
            shapes.add(tuple(pool.shape for pool in pools))
    assert len(shapes) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for the memory back")
def test_a_large_cache_takes_no_memory_until_it_is_used():
    """A server's cache may hold gigabytes; one short conversation must not take them."""
    large = dataclasses.replace(SMALL, kv_cache_memory_bytes=256 << 20)
    process = psutil.Process()
    with serve(tiny_model("llama"), engine=large) as model:
        before = process.memory_info().rss
        assert sum(pool.nbytes for pool in model.engine._runner._cache.pools) > 255 << 20
        assert process.memory_info().rss - before < 128 << 20
        assert model.engine.submit(request([5, 6, 7])).result() == expected_tokens("llama", [5, 6, 7], 8)


def test_many_threads_on_one_model(llama):
    rng = random.Random(6)
    prompts = [random_prompt(rng, 20) for _ in range(24)]
    config = transformers.GenerationConfig(max_new_tokens=6)
    found = at_once(lambda prompt: list(llama.iter_tokens(prompt, config)), prompts)
    assert found == [expected_tokens("llama", prompt, 6) for prompt in prompts]


def test_async_iteration_and_leaving_it_early(llama, monkeypatch):
    schedule = Scheduler.schedule
    # A reader of a quick engine on a busy machine would find all tokens at once.
    monkeypatch.setattr(Scheduler, "schedule", lambda *args: time.sleep(0.01) or schedule(*args))

    async def read(prompt, most):
        handle = llama.engine.submit(request(prompt, 30))
        async for _ in handle:
            if len(handle.token_ids) >= most:
                break
        return handle

    async def both():
        return await asyncio.gather(read([5, 6], 30), read([7, 8], 2))

    whole, left = asyncio.run(both())
    assert whole.token_ids == expected_tokens("llama", [5, 6], 30)
    assert 2 <= len(left.token_ids) < 30  # several may come at once
    assert left.token_ids == expected_tokens("llama", [7, 8], 30)[: len(left.token_ids)]
    assert left.finish_reason is None


def test_an_event_loop_is_woken_once_for_all_that_a_step_brings(llama):
    num_calls = []

    async def read(prompt):
        handle = llama.engine.submit(request(prompt, 12))
        return [token async for new in handle for token in new.token_ids]

    async def all_of(prompts):
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: num_calls.append(0) or wake(*args)
        return await asyncio.gather(*map(read, prompts))

    prompts = [[5, 6, first] for first in (7, 8, 9, 10)]
    begun = steps_taken(llama)
    assert asyncio.run(all_of(prompts)) == [expected_tokens("llama", prompt, 12) for prompt in prompts]
    assert len(num_calls) <= steps_taken(llama) - begun + 1  # and once when the loop ends


def test_a_request_that_comes_is_not_held_up_by_steps_that_are_still_to_be_sent(llama, monkeypatch):
    monkeypatch.setattr(llama.engine._scheduler, "expected_seconds", lambda plan: 60.0)
    running = llama.engine.submit(request([3, 4], 50))
    time.sleep(0.5)  # some of its steps are on their way, and more would be due in 45 s
    begun = time.monotonic()
    coming = llama.engine.submit(request([5, 6], 2))
    assert list(next(iter(coming)).token_ids) == expected_tokens("llama", [5, 6], 1)
    assert time.monotonic() - begun < 30
    monkeypatch.undo()
    for handle in (running, coming):
        handle.cancel()
        handle.result()
    assert time.monotonic() - begun < 30


def test_stats_are_a_line(llama):
    llama.engine.submit(request([5, 6], 3)).result()
    line = str(llama.stats())
    for word in ("running", "waiting", "pages", "prefix hits", "preempted", "programs", "tokens/s"):
        assert word in line


def test_closing_ends_requests_with_an_error():
    model = serve(tiny_model("llama"), engine=SMALL)
    engine = model.engine
    handles = [engine.submit(request([5, 6, number + 3], 50)) for number in range(8)]
    model.close()
    for handle in handles:
        with pytest.raises(RequestError, match="engine was closed"):
            handle.result()
    with pytest.raises(TorchaxServeError, match="this one is closed"):
        engine.submit(request([5], 1))
    with pytest.raises(TorchaxServeError, match="this one is closed"):
        model.engine.stats()


def test_a_process_ends_with_requests_in_flight():
    code = """
from torchax_serve import serve
model = serve()
stream = model.stream("What is")
print(next(stream), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_pool_is_updated_in_place(llama):
    cache = llama.engine._runner._cache
    llama.engine.submit(request([5, 6], 2)).result()
    before = cache.pools[0].unsafe_buffer_pointer()
    llama.engine.submit(request([5, 6, 7], 4)).result()
    assert cache.pools[0].unsafe_buffer_pointer() == before
    assert isinstance(cache.pools[0], jax.Array)
    assert cache.pools[0].dtype == jnp.float32


def test_caches_are_paged_where_transformers_names_no_layers_without_keys(monkeypatch):
    """Releases before 5.23 have no `DummyLayer`."""
    others = {name: each for name, each in vars(transformers.cache_utils).items() if name != "DummyLayer"}
    monkeypatch.setattr(transformers, "cache_utils", types.SimpleNamespace(**others))
    with serve(tiny_model("llama"), engine=SMALL) as model:
        assert model.engine.submit(request([5, 6, 7], 3)).result() == expected_tokens("llama", [5, 6, 7], 3)
        assert "not packed" not in model.engine.description
