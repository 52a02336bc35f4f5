"""Pages in 8 bits: what is computed on them, that nothing else about requests changes, and where they are refused."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from cache_name import CACHE
from engine_models import VOCAB_SIZE, tiny_model
from engine_requests import engine_request
from thorough import thorough
from transformers.cache_utils import DynamicCache

from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.engine.factory import build_engine, build_single_engine
from torchax_serve.executors.choice import choose_executor
from torchax_serve.executors.packed.factory import packed_executor
from torchax_serve.executors.per_sequence.executor import PerSequenceExecutor
from torchax_serve.executors.per_sequence.factory import PerSequenceFactory
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.kv_cache.scales import HEADROOM, TRIAL_LEN, TRIAL_ROWS
from torchax_serve.scheduler import PlanRow

LAYOUT = {"max_model_len": 64, "max_num_seqs": 4, "page_size": 8, "max_num_batched_tokens": 32}
INT8, FP8 = (EngineOptions(**LAYOUT, kv_cache_dtype=name) for name in ("int8", "fp8"))
LARGEST = {"int8": 127, "float8_e4m3fn": 448}
BOUND = 2e-3
"""Of a log-probability beside the same rounding by numpy. Sums in another order put one number in some thousands on the
other side of a half; all other differences are a hundred times smaller."""


def request(prompt, max_new_tokens=8, params=None, fork_of=None, **config):
    generation = transformers.GenerationConfig(max_new_tokens=max_new_tokens, **config)
    params = params or SamplingParams()
    generation = params.merged_into(generation)
    return engine_request(prompt, generation, params, seed=0, fork_of=fork_of)


def prompt_of(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def rounded(numbers, scale, dtype):
    """Keys or values [..., heads, n, dim] as pages in `dtype` have them, by numpy, for scales [heads]."""
    by_head, largest = scale[:, None, None], LARGEST[dtype]
    steps = np.clip(numbers / by_head, -largest, largest)
    steps = np.rint(steps) if dtype == "int8" else steps.astype(jnp.float8_e4m3fn).astype(np.float32)
    return torch.from_numpy((steps * by_head).astype(np.float32))


class RoundedCache(DynamicCache):
    """transformers' own cache over keys and values that numpy has rounded."""

    def __init__(self, scales, dtype):
        super().__init__()
        self.scales, self.dtype = scales, dtype

    def update(self, keys, values, layer_idx, *args, **kwargs):
        pairs = zip((keys, values), self.scales[layer_idx], strict=True)
        return super().update(*(rounded(x.numpy(), by, self.dtype) for x, by in pairs), layer_idx, *args, **kwargs)


@pytest.fixture(scope="module")
def llama():
    with serve(tiny_model("llama"), engine=INT8) as model:
        model.engine.check_integrity = True
        yield model


@torch.no_grad()
def test_latents_are_rounded_once_as_keys_and_values(monkeypatch):
    """Latents and the rotated part have one scale; pages have no other number of a token."""
    prompt, eager = prompt_of(48, 1), tiny_model("youtu")
    with serve(tiny_model("youtu"), engine=INT8) as model:
        scales, found = model.engine._runner._cache._scales, logprobs_of(model, prompt)
        (pool, *_) = model.engine._runner._cache.pools
        assert "per-sequence" not in model.engine.description
    attention = eager.model.layers[0].self_attn
    assert pool.pages.shape[3] == attention.kv_lora_rank + attention.qk_rope_head_dim
    exact, kind = eager_logprobs(prompt, model=eager), type(eager.model.layers[0].self_attn)
    own = kind.expand_kv

    def expand_rounded(self, latents, rotated):
        of_keys, of_values = scales[self.layer_idx]
        np.testing.assert_array_equal(of_keys, of_values)
        return own(self, *(rounded(x.numpy(), of_keys, "int8") for x in (latents, rotated)))

    monkeypatch.setattr(kind, "expand_kv", expand_rounded)
    np.testing.assert_allclose(found, eager_logprobs(prompt, model=eager), atol=BOUND)
    assert np.abs(found - exact).max() > 10 * BOUND


def logprobs_of(model, prompt):
    """Of the tokens of a prompt behind the first, float[len - 1]."""
    arrivals = list(model.engine.submit(request(prompt, 1, SamplingParams(prompt_logprobs=0))))
    found = next(new.prompt_logprobs for new in arrivals if new.prompt_logprobs)
    return np.array([each.logprob for each in found[1:]])


@torch.no_grad()
def eager_logprobs(prompt, scales=None, dtype="int8", model=None):
    cache = None if scales is None else RoundedCache(scales, dtype)
    ids = torch.tensor([prompt])
    logits = (model or tiny_model("llama"))(ids, **{CACHE: cache}).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def llama_in_float8():
    with serve(tiny_model("llama"), engine=FP8) as model:
        model.engine.check_integrity = True
        yield model


@pytest.mark.parametrize(("name", "dtype"), [("llama", "int8"), ("llama_in_float8", "float8_e4m3fn")])
def test_log_probabilities_are_those_of_rounded_keys_and_values(name, dtype, request):
    model = request.getfixturevalue(name)
    cache = model.engine._runner._cache
    assert {str(pool.pages.dtype) for pool in cache.pools} == {dtype}
    assert f"MB in {dtype}: " in model.engine.description
    prompt = prompt_of(48, 1)
    found = logprobs_of(model, prompt)
    np.testing.assert_allclose(found, eager_logprobs(prompt, cache._scales, dtype), atol=BOUND)
    whole = np.abs(found - eager_logprobs(prompt))
    assert 10 * BOUND < whole.max() < 0.5  # it is rounded, and not much


@torch.no_grad()
def test_scales_are_the_largest_numbers_of_a_prompt_with_a_margin(llama):
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, (TRIAL_ROWS, TRIAL_LEN)))
    layers = tiny_model("llama")(ids, use_cache=True)[CACHE].layers
    for layer, scales in zip(layers, llama.engine._runner._cache._scales, strict=True):
        for numbers, scale in zip((layer.keys, layer.values), scales, strict=True):
            np.testing.assert_allclose(scale, numbers.abs().amax((0, 2, 3)).numpy() * HEADROOM / 127, rtol=1e-5)


def run_by_hand(model, ids, num_decoded, name="int8"):
    """Logits [n, vocab] of a prompt in two chunks and of tokens decoded one by one, and the pools behind them."""
    sizes = MemoryBudget(**LAYOUT, kv_cache_memory_bytes=1 << 18, kv_cache_dtype=name)
    choice = packed_executor(model._generator()._jax_runtime, sizes)
    table = np.zeros((4, 8), np.int32)
    table[1] = [5, 3, 7, 1, 2, 4, 6, 8]
    logits = []
    cuts = [0, 11, *range(len(ids) - num_decoded, len(ids) + 1)]
    for start, end in itertools.pairwise(cuts):
        rows = [PlanRow(0, 1, start, end - start, tuple(ids[start:end]), True)]
        logits.append(np.asarray(choice.executor.run(rows, (table,), to_device(np.zeros(4), np.int32)))[0])
    return np.stack(logits), [np.asarray(pool.pages) for pool in choice.executor.cache.pools]


def test_kernels_store_what_the_reference_stores_and_attend_alike(llama):
    ids = prompt_of(40, 2)
    logits, pools = run_by_hand(llama, ids, 6)
    with registry.use("paged_attention", "reference"), registry.use("decode_attention", "reference"):
        expected, expected_pools = run_by_hand(llama, ids, 6)
    np.testing.assert_allclose(logits, expected, atol=BOUND)
    np.testing.assert_array_equal(pools[0], expected_pools[0])
    assert np.abs(pools[0].astype(np.int32)).max() > 60
    for found, wanted in zip(pools[1:], expected_pools[1:], strict=True):
        assert np.abs(found.astype(np.int32) - wanted).max() <= 1  # of steps, where a number lies between two
        assert (found != wanted).mean() < 1e-3


def test_kernels_store_float8_as_the_reference_does_and_attend_alike(llama_in_float8):
    ids = prompt_of(40, 2)
    logits, pools = run_by_hand(llama_in_float8, ids, 6, "fp8")
    with registry.use("paged_attention", "reference"), registry.use("decode_attention", "reference"):
        expected, expected_pools = run_by_hand(llama_in_float8, ids, 6, "fp8")
    np.testing.assert_allclose(logits, expected, atol=BOUND)
    np.testing.assert_array_equal(pools[0].view(np.uint8), expected_pools[0].view(np.uint8))
    assert np.abs(pools[0].astype(np.float32)).max() > 200
    for found, wanted in zip(pools[1:], expected_pools[1:], strict=True):
        steps = np.abs(found.view(np.uint8).astype(np.int32) - wanted.view(np.uint8))
        assert (steps > 0).mean() < 1e-3  # where a number lies between two
        assert np.isin(steps, (0, 1, 128)).all()  # neighbours, or zeros of either sign


@torch.no_grad()
@pytest.mark.parametrize(("name", "dtype"), [thorough("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_a_model_that_runs_per_sequence_reads_rounded_keys_and_values(name, dtype, monkeypatch):
    """Each forward attends to its own tokens as they are, and to those stored before as numpy rounds them."""
    made, own = [], PerSequenceFactory.model  # whose programs are compiled by each executor anew
    monkeypatch.setattr(PerSequenceFactory, "model", lambda *each: made.append(each[1:]) or own(*each))
    ids, cuts = prompt_of(20, 3), [0, 16, 17, 18, 19, 20]
    sizes = MemoryBudget(**LAYOUT, kv_cache_memory_bytes=1 << 18, kv_cache_dtype=name)
    with serve(tiny_model("bloom")) as model:
        executor = choose_executor(model._generator()._jax_runtime, sizes).executor
        assert isinstance(executor, PerSequenceExecutor)
        assert len(made) == len({(id(cache), block_len) for cache, block_len in made})
        scales, (table,) = executor.cache._scales, executor.first_pages()
        eager, cache, whole = tiny_model("bloom"), DynamicCache(), DynamicCache()
        for start, end in itertools.pairwise(cuts):
            row = PlanRow(0, 0, start, end - start, tuple(ids[start:end]), True)
            found = np.asarray(executor.run([row], (table,), to_device(np.zeros(4), np.int32)))[0]
            new = torch.tensor([ids[start:end]])
            expected, exact = (
                eager(new, attention_mask=torch.ones(1, end), **{CACHE: each}).logits[0, -1].numpy()
                for each in (cache, whole)
            )
            np.testing.assert_allclose(found, expected, atol=BOUND)
            for layer, pair in zip(cache.layers, scales, strict=True):
                for part, scale in zip(("keys", "values"), pair, strict=True):
                    setattr(layer, part, rounded(getattr(layer, part).numpy(), scale, dtype))
        assert np.abs(expected - exact).max() > 10 * BOUND
        assert {str(pool.pages.dtype) for pool in executor.cache.pools} == {dtype}


@pytest.fixture(scope="module")
def alone(llama):
    """Tokens of a prompt alone, computed once for each."""
    known = {}

    def tokens(prompt, length=8):
        if tuple(prompt) not in known:
            known[tuple(prompt)] = llama.engine.submit(request(prompt, 12)).result()
        return known[tuple(prompt)][:length]

    return tokens


def test_prefix_hits_and_forks_find_their_pages(llama, alone):
    prompt = prompt_of(35, 3)
    expected = alone(prompt)
    hits = llama.stats().scheduler.num_hit_tokens
    assert llama.engine.submit(request(prompt)).result() == expected
    assert llama.stats().scheduler.num_hit_tokens >= hits + 32
    parent = llama.engine.submit(request([*prompt, 9]))
    forks = [llama.engine.submit(request([*prompt, 9], fork_of=parent.request_id)) for _ in range(3)]
    assert len({tuple(handle.result()) for handle in (parent, *forks)}) == 1
    sampled = {"do_sample": True, "temperature": 2.0, "top_k": 0}
    apart = llama.engine.submit(request([*prompt, 9], 12, **sampled))  # writes its own copy of the shared last page
    assert llama.engine.submit(request([*prompt, 9])).result() == parent.token_ids
    apart.result()


def test_requests_that_make_room_for_others_get_the_same_tokens(alone):
    prompts = [prompt_of(1 + 7 * seed % 30, seed) for seed in range(12)]
    few = EngineOptions(
        max_model_len=48,
        max_num_seqs=4,
        page_size=8,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=6000,
        kv_cache_dtype="int8",
    )
    with serve(tiny_model("llama"), engine=few) as model:
        model.engine.check_integrity = True
        handles = [model.engine.submit(request(prompt, 12)) for prompt in prompts]
        found = [handle.result() for handle in handles]
        assert model.stats().scheduler.num_preemptions > 0
    assert found == [alone(prompt, 12) for prompt in prompts]


def test_a_step_that_takes_the_cache_with_it_leaves_scales(alone, monkeypatch):
    with serve(tiny_model("llama"), engine=INT8) as model:
        engine = model.engine
        run = engine._runner._executor.run

        def failing(*args, **kwargs):
            monkeypatch.setattr(engine._runner._executor, "run", run)
            for array in jax.tree.leaves(engine._runner._cache.pools):
                array.delete()
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine._runner._executor, "run", failing)
        with pytest.raises(Exception, match="out of memory"):
            engine.submit(request([5, 6, 7])).result()
        assert engine.submit(request([5, 6, 7])).result() == alone([5, 6, 7])


def test_twice_as_many_tokens_in_the_same_bytes():
    budget = 200_000
    tokens = {}
    for dtype in (None, "int8"):
        options = EngineOptions(max_model_len=64, page_size=8, kv_cache_memory_bytes=budget, kv_cache_dtype=dtype)
        with serve(tiny_model("llama", torch.bfloat16), engine=options) as model:
            cache = model.engine._runner._cache
            tokens[dtype] = cache.plan.num_tokens
            taken = sum(array.nbytes for pool in cache.pools for array in [getattr(pool, "pages", pool)])
            assert 0.98 * budget < taken <= budget
            assert ("in int8" in model.engine.description) == (dtype == "int8")
    assert tokens["int8"] == pytest.approx(2 * tokens[None], abs=16)


def test_int8_is_refused_where_it_cannot_be():
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype: expected 'int8', 'fp8' or None, got 'int4'"):
        EngineOptions(kv_cache_dtype="int4")
    with (
        serve(tiny_model("mamba"), engine=INT8) as model,
        pytest.raises(InvalidArgumentError, match="kv_cache_dtype: expected None for a model that stores states in"),
    ):
        model.engine.stats()
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype: expected None for requests that share no batch"):
        build_single_engine(None, INT8)


def test_float8_is_refused_on_chips_without(llama):
    runtime = llama._generator()._jax_runtime
    with (
        registry.on_platform("tpu"),  # none of this process has float8
        pytest.raises(
            InvalidArgumentError, match=r"kv_cache_dtype: expected 'int8' or None on .*, which has no float8"
        ),
    ):
        build_engine(runtime, FP8)


def test_int8_is_refused_where_kernels_take_the_models_dtype_alone(llama):
    runtime = llama._generator()._jax_runtime
    options = EngineOptions(
        max_model_len=64, max_num_seqs=4, page_size=16, kv_cache_memory_bytes=1 << 20, kv_cache_dtype="int8"
    )
    with (
        registry.on_platform("tpu"),
        pytest.raises(InvalidArgumentError, match=r"pages of 16 positions; the kernel needs a multiple of 32"),
    ):
        build_engine(runtime, options)
