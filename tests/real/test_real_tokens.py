"""Language models: tokens, processors, seeds, stop strings, perplexity, beside eager transformers."""

import gc
import math

import pytest
import texts
import torch
from conftest import Eager
from fetch import folder_of

from torchax_serve import SamplingParams, serve, to_jax
from torchax_serve.parity.verify import verify

NUM_TOKENS = 8
PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[504], [28], [198, 198]]},
    "min_new_tokens": {"min_new_tokens": NUM_TOKENS},
    "all of them": {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "bad_words_ids": [[30]], "min_new_tokens": 7},
}


@pytest.fixture(scope="module")
def expected(smollm2):
    """Prompts, and what eager ``generate`` appends to each."""
    prompts = texts.prompts(smollm2.tokenizer)
    return prompts, [smollm2.new_tokens(prompt, NUM_TOKENS) for prompt in prompts]


def greedy(num_tokens=NUM_TOKENS, **options):
    return SamplingParams(max_new_tokens=num_tokens, temperature=0, **options)


def test_tokens_of_40_prompts(served, expected, found):
    prompts, tokens = expected
    assert len(prompts) == 40
    assert max(map(len, prompts)) == 1500
    together = served.generate_batch(prompts, greedy())
    assert [each.token_ids for each in together] == tokens
    found("smollm2", "greedy tokens of 40 prompts, up to 1,500 tokens, on the engine", "equal")


def test_generate_of_the_drop_in(smollm2, expected, found):
    model = to_jax(Eager("smollm2").model)
    prompts, tokens = expected
    for index in (0, 2, 20, 27, 39):
        ids = torch.tensor([prompts[index]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        assert output[0, ids.shape[1] :].tolist() == tokens[index]
    found("smollm2", "greedy tokens of `to_jax(model).generate`", "equal")


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(served, smollm2, name, found):
    for prompt in (texts.SHORT[0], texts.SHORT[2], texts.SHORT[34]):
        ids = smollm2.tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, **PROCESSORS[name]}
        assert served.generate(**ids, **options).tolist() == smollm2.model.generate(**ids, **options).tolist()
    found("smollm2", "tokens with repetition penalty, n-gram bans, bad words, least length", "equal")


def test_64_requests_each_as_alone(served, expected, found):
    prompts, tokens = expected
    requests = [(prompt, greedy()) for prompt in prompts[:37]]
    requests += [(prompts[39], greedy(4)), (prompts[37], greedy(6)), (prompts[38], greedy(5))]
    for index in range(24):
        options = [{"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 20, "repetition_penalty": 1.2}, {"min_p": 0.1}]
        requests.append((prompts[index], SamplingParams(max_new_tokens=6, seed=index, **options[index % 4])))
    together = served.generate_batch([prompt for prompt, _ in requests], [params for _, params in requests])
    assert len(together) == 64
    for (_, params), ours, theirs in zip(requests[:37], together[:37], tokens[:37], strict=True):
        assert params.seed is None
        assert ours.token_ids == theirs
    for (prompt, params), ours in list(zip(requests, together, strict=True))[37:]:
        (alone,) = served.generate_batch([prompt], params)
        assert ours.token_ids == alone.token_ids
    found("smollm2", "64 mixed requests at once, greedy and sampled, each beside itself alone", "equal")


def test_seeds(served, found):
    params = [SamplingParams(max_new_tokens=16, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    one, same, other = served.generate_batch([texts.SHORT[1]] * 3, params)
    assert one.token_ids == same.token_ids != other.token_ids
    found("smollm2", "a seed's tokens again, another seed's others", "yes")


def test_stop_strings(served, smollm2, found):
    prompt = "Count: one, two, three,"
    ids = smollm2.tokenizer(prompt)["input_ids"]
    whole = smollm2.tokenizer.decode(smollm2.new_tokens(ids, 24))
    stop = whole[9:12]  # inside of tokens, as it comes
    (answer,) = served.generate_batch([prompt], greedy(24, stop=[stop]))
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(stop)]
    assert "".join(served.stream(prompt, greedy(24, stop=[stop]))) == answer.text
    found("smollm2", "stop strings", "cut where eager's text has them")


def perplexity(model, ids):
    """exp of the mean negative log-likelihood that `model`, eager or on JAX, gives to a text."""
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    return math.exp(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_perplexity(name, found):
    gc.collect()
    eager = Eager(name)
    ids = torch.tensor([eager.tokenizer(texts.TEXT)["input_ids"][:1024]])
    exact = perplexity(eager.model, ids)
    rounded = perplexity(eager.model.to(torch.bfloat16), ids)
    del eager
    with serve(folder_of(name), dtype="float32") as model:
        ours = perplexity(model, ids)
    assert ours == pytest.approx(exact, rel=1e-4)
    with serve(folder_of(name)) as model:
        assert model.dtype == torch.bfloat16
        ours_rounded = perplexity(model, ids)
    # Rounding moves it either way: as far as eager PyTorch's moves it, or a hundredth.
    assert abs(ours_rounded - exact) <= max(0.01 * exact, 2 * abs(rounded - exact))
    found(
        name,
        "perplexity of 1,024 tokens (eager; in bfloat16)",
        f"{ours:.3f} ({exact:.3f}; {ours_rounded:.3f}, eager {rounded:.3f})",
    )


def test_gemma_with_windows(found):
    eager = Eager("gemma3")
    prompts = texts.prompts(eager.tokenizer)
    chosen = [prompts[index] for index in (0, 2, 11, 20, 25, 27, 28, 37, 39)]  # the last ones beyond the window of 512
    tokens = [eager.new_tokens(prompt, 6) for prompt in chosen]
    del eager
    with serve(folder_of("gemma3"), dtype="float32") as model:
        together = model.generate_batch(chosen, greedy(6))
    assert [each.token_ids for each in together] == tokens
    found("gemma3", "greedy tokens of 9 prompts, up to 1,500 tokens, on the engine", "equal")


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "minilm"])
def test_verify_in_bfloat16(name, found):
    result = verify(folder_of(name), dtype="bfloat16", new_tokens=0 if name == "minilm" else 8)
    assert result.passed, result.first_beyond
    worst = max((row for row in result.prompt if row.eager_error), key=lambda row: row.error / row.eager_error)
    found(name, "`verify` in bfloat16: error beside eager PyTorch's, at most", f"{worst.error / worst.eager_error:.1f}")
