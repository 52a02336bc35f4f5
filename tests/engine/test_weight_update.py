"""`set_weights`: tokens are those of a fresh `serve` of the new weights, whatever runs; nothing is compiled."""

import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch
from engine_models import VOCAB_SIZE, tiny_model

from model_adapters.errors import InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.runtime import new_weights

OPTIONS = EngineOptions(max_model_len=96, max_num_seqs=8, page_size=8, max_num_batched_tokens=32)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, VOCAB_SIZE, 40)]  # five pages
NUM_NEW = 12
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, logprobs=0)


def other_model(seed, name="llama"):
    """The same model with other weights."""
    model = tiny_model(name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def eager(model, prompt=PROMPT, num_new=NUM_NEW):
    return model.generate(torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False)[0, len(prompt) :].tolist()


def ask(served, prompt=PROMPT, params=GREEDY):
    return served.generate_batch([prompt], [params])[0]


@pytest.fixture(scope="module")
def versions():
    """Three sets of weights and eager's tokens of each."""
    models = [other_model(seed) for seed in (1, 2, 3)]
    tokens = [eager(model) for model in models]
    assert len({tuple(row) for row in tokens}) == 3
    return [(weights_of(model), row) for model, row in zip(models, tokens, strict=True)]


@pytest.fixture
def served():
    with serve(tiny_model("llama"), engine=OPTIONS) as model:
        model.engine.check_integrity = True
        yield model


def test_tokens_are_those_of_the_new_weights_and_no_page_of_before_is_found(served, versions):
    before = ask(served)
    assert before.token_ids == eager(tiny_model("llama"))
    assert {each.weights_version for each in before.logprobs} == {0}
    ask(served)
    hits = served.stats().scheduler.num_hit_tokens
    assert hits, "the prompt is long enough for the cache"
    ask(served, PROMPT[::-1])  # a step of a prompt that the cache has nothing of
    served.engine._runner._background.wait()  # for programs that are compiled ahead
    programs, hits = served.stats().num_programs, served.stats().scheduler.num_hit_tokens
    for number, (weights, tokens) in enumerate(versions, 1):
        assert served.set_weights(weights) == served.weights_version == number
        after = ask(served)
        assert after.token_ids == tokens
        assert {each.weights_version for each in after.logprobs} == {number}
        assert served.stats().scheduler.num_hit_tokens == hits
    assert served.stats().num_programs == programs
    assert ask(served).token_ids == versions[-1][1]
    assert served.stats().scheduler.num_hit_tokens > hits, "pages of the new weights are shared"


def test_forward_generate_and_state_dict_have_the_new_weights(served, versions):
    weights, tokens = versions[0]
    served.set_weights(weights)
    ids = torch.tensor([PROMPT])
    assert served.generate(ids, max_new_tokens=NUM_NEW, do_sample=False)[0, len(PROMPT) :].tolist() == tokens
    state = served.state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    served.refresh()
    assert ask(served).token_ids == tokens


def test_a_model_read_from_files_without_values_in_torch(tmp_path, versions):
    tiny_model("llama").save_pretrained(tmp_path)
    with serve(tmp_path, engine=OPTIONS) as served:
        ask(served)
        served.set_weights(versions[1][0])
        assert ask(served).token_ids == versions[1][1]
        served.save_pretrained(tmp_path / "new")
    with serve(tmp_path / "new", engine=OPTIONS) as fresh:
        assert ask(fresh).token_ids == versions[1][1]


def swap_at_step(served, monkeypatch, number, weights, when, submitted=None):
    """Calls `set_weights` in a thread, which is started, once the engine is in step `number` from now.

    The first step waits until `submitted` is set.
    """
    engine = served.engine
    execute, counts = engine._runner.execute, iter(range(10_000))
    swap = threading.Thread(target=served.set_weights, args=(weights,), kwargs={"when": when})

    def counted(*args):
        if submitted is not None:
            assert submitted.wait(120)
        if next(counts) == number:
            swap.start()
            while not engine._commands:
                time.sleep(0.001)
        return execute(*args)

    monkeypatch.setattr(engine._runner, "execute", counted)
    return swap


@pytest.mark.parametrize("when", ["idle", "now"])
def test_a_swap_while_eight_requests_stream(served, versions, monkeypatch, when):
    weights, tokens = versions[0]
    rng = np.random.default_rng(1)
    prompts = [[int(token) for token in rng.integers(3, VOCAB_SIZE, 20)] for _ in range(8)]
    submitted = threading.Event()
    swap = swap_at_step(served, monkeypatch, 30, weights, when, submitted)
    params = SamplingParams(max_new_tokens=60, temperature=0.0, logprobs=0)
    streams = [served.iter_tokens(prompt, params=params) for prompt in prompts]
    late = served.iter_tokens(PROMPT, params=GREEDY)  # waits for a slot, and begins after the swap
    submitted.set()
    rows = [list(stream) for stream in streams]
    swap.join()
    assert list(late) == tokens
    assert {each.weights_version for each in late.logprobs} == {1}
    assert [len(row) for row in rows] == [60] * 8
    kinds = [[each.weights_version for each in stream.logprobs] for stream in streams]
    assert all(row == sorted(row) and row[0] == 0 for row in kinds)
    if when == "idle":
        assert rows == [eager(tiny_model("llama"), prompt, 60) for prompt in prompts]
        assert {version for row in kinds for version in row} == {0}, "they ended with the weights that they began with"
    else:
        assert all(set(row) == {0, 1} for row in kinds)
    for prompt in prompts[:3]:  # none finds pages of before, nor of requests that have seen both
        assert ask(served, prompt).token_ids == eager(other_model(1), prompt)


def test_a_swap_in_the_middle_of_a_chunked_prompt(served, versions, monkeypatch):
    weights, _ = versions[0]
    long = PROMPT + PROMPT[::-1]  # three chunks of at most 32 tokens
    swap = swap_at_step(served, monkeypatch, 0, weights, "now")
    begun = served.generate_batch([long], [GREEDY])[0]
    swap.join()
    assert {each.weights_version for each in begun.logprobs} == {1}
    wanted = eager(other_model(1), long)
    assert begun.token_ids != wanted, "its first chunk is of the weights of before"
    assert ask(served, long).token_ids == wanted
    assert ask(served).token_ids == versions[0][1]


def test_a_hundred_swaps_leak_nothing(served, versions):
    sets = [weights for weights, _ in versions]
    for weights in sets:
        served.set_weights(weights)
    ask(served)
    served.engine._runner._background.wait()  # for programs that are compiled ahead
    gc.collect()
    num_arrays, process = len(jax.live_arrays()), psutil.Process()
    memory = process.memory_info().rss
    programs = served.stats().num_programs
    for number in range(100):
        served.set_weights(sets[number % 3], when=("idle", "now")[number % 2])
    gc.collect()
    # Before the next request: arrays of its last step stay for a while, as many as that step had.
    assert len(jax.live_arrays()) <= num_arrays + 8
    assert ask(served).token_ids == versions[99 % 3][1]
    assert served.stats().num_programs == programs
    assert process.memory_info().rss - memory < 50e6
    assert served.weights_version == 103


def test_arrays_may_be_donated_after_the_call_and_in_other_dtypes(served, versions):
    weights, tokens = versions[2]
    arrays = {name: jnp.asarray(tensor.numpy()) for name, tensor in weights.items()}
    served.set_weights(arrays)
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(arrays)
    assert ask(served).token_ids == tokens
    served.set_weights({name: tensor.double().numpy() for name, tensor in weights.items()})
    assert ask(served).token_ids == tokens
    with pytest.raises(InvalidArgumentError, match="expected an array with values, got one that was donated"):
        served.set_weights(arrays)


def test_tied_weights_need_one_of_their_names():
    with serve(tiny_model("gpt2"), engine=OPTIONS) as served:
        model = other_model(4, "gpt2")
        weights = weights_of(model)
        assert {"lm_head.weight", "transformer.wte.weight"} <= weights.keys()
        del weights["lm_head.weight"]
        served.set_weights(weights)
        assert ask(served).token_ids == eager(model)
        weights["lm_head.weight"] = weights["transformer.wte.weight"] + 1
        with pytest.raises(InvalidArgumentError, match="which are one weight, got two; give one"):
            served.set_weights(weights)


def test_recurrent_models_without_pages_of_prefixes():
    with serve(tiny_model("mamba"), engine=OPTIONS) as served:
        ask(served)
        model = other_model(5, "mamba")
        served.set_weights(weights_of(model))
        assert ask(served).token_ids == eager(model)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {**w, NORM: w[NORM][:-1]}, rf"{NORM}: expected shape \(32,\)"),
        (lambda w: {n: t for n, t in w.items() if "mlp" not in n}, "expected all 21 .*got none for .*and 2 more"),
        (lambda w: {**w, "model.norm": w[NORM]}, "expected names of the model's state_dict, got model.norm;"),
        (lambda w: {**w, NORM: w[NORM].long()}, f"{NORM}: expected float32, got int"),
        (lambda w: {**w, NORM: [1.0] * 32}, "expected a JAX, NumPy or PyTorch array, got list"),
        (lambda w: list(w), "weights: expected a mapping of arrays by name, got list"),
    ],
)
def test_bad_weights_are_refused_and_nothing_is_exchanged(served, versions, change, message):
    served.set_weights(versions[0][0])
    with pytest.raises(InvalidArgumentError, match=message):
        served.set_weights(change(versions[1][0]))
    assert served.weights_version == 1
    assert ask(served).token_ids == versions[0][1]


def test_part_of_the_weights(served, versions):
    served.set_weights(versions[0][0])
    served.set_weights({n: t for n, t in versions[1][0].items() if "layers.1" in n}, partial=True)
    served.set_weights({n: t for n, t in versions[1][0].items() if "layers.1" not in n}, partial=True)
    assert ask(served).token_ids == versions[1][1]


def test_what_cannot_be_exchanged_says_so(versions):
    weights = versions[0][0]
    with serve(tiny_model("llama"), engine=OPTIONS) as served, pytest.raises(InvalidArgumentError, match="'soon'"):
        served.set_weights(weights, when="soon")
    with (
        serve(tiny_model("llama"), engine=OPTIONS, quantization="int8") as served,
        pytest.raises(UnsupportedModelError, match='QuantizedWeight; serve the model with quantization="none"'),
    ):
        served.set_weights(weights)
    int8 = EngineOptions(max_model_len=64, kv_cache_dtype="int8")
    with (
        serve(tiny_model("llama"), engine=int8) as served,
        pytest.raises(UnsupportedModelError, match="scales were measured"),
    ):
        served.set_weights(weights)


def test_a_closed_model_ends_a_swap_that_waits(served, versions):
    stream = served.iter_tokens(PROMPT[:4], params=SamplingParams(max_new_tokens=80, temperature=0.0))
    next(stream)
    errors = []

    def swap():
        try:
            served.set_weights(versions[0][0])
        except TorchaxServeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=swap)
    thread.start()
    served.close()
    thread.join(30)
    assert not thread.is_alive()
    assert not errors or "closed" in errors[0]


def test_a_model_that_is_closed_during_a_swap_says_so(versions, monkeypatch):
    with serve(tiny_model("llama"), engine=OPTIONS) as model:
        own = new_weights.laid_out

        def closed_meanwhile(runtime, given):
            model.close()
            return own(runtime, given)

        monkeypatch.setattr(new_weights, "laid_out", closed_meanwhile)
        with pytest.raises(TorchaxServeError, match="expected an open model, this one is closed"):
            model.set_weights(versions[0][0])


def test_sleep_frees_the_pools_and_wake_allocates_them(served, versions):
    tokens = ask(served).token_ids
    gc.collect()
    executor = served.engine._runner._executor
    held = sum(pool.nbytes for pool in jax.tree.leaves(executor.cache.pools))
    before = sum(array.nbytes for array in jax.live_arrays())
    served.sleep()
    gc.collect()
    assert before - sum(array.nbytes for array in jax.live_arrays()) >= held > 0
    with pytest.raises(TorchaxServeError, match=r"call wake\(\) first"):
        ask(served)
    served.set_weights(versions[0][0])
    served.sleep()  # twice does nothing
    served.wake()
    served.wake()
    assert ask(served).token_ids == versions[0][1] != tokens
