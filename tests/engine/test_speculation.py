"""Speculation on the engine: the tokens of single steps, bit by bit, in fewer steps."""

import dataclasses
import random

import numpy as np
import pytest
import torch
import transformers
from adapter_models import PeftModels, ranks
from engine_models import VOCAB_SIZE, expected_tokens, tiny_model
from speculation_requests import answers_of, repeating_prompts, request, tokens_of
from thorough import thorough

from model_adapters.errors import ModelNotFoundError
from torchax_serve import EngineOptions, InvalidArgumentError, SamplingParams, UnsupportedArgumentError, serve

SIZES = EngineOptions(
    max_model_len=96, max_num_seqs=4, page_size=8, max_num_batched_tokens=32, max_num_steps=4, batch_invariant=True
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}


@pytest.fixture(scope="module", params=[torch.float32, thorough(torch.bfloat16)], ids=["float32", "bfloat16"])
def pair(request):
    """A model without and one with speculation."""
    options = SIZES, dataclasses.replace(SIZES, speculative=NGRAM)
    models = [serve(tiny_model("qwen3", request.param), engine=each) for each in options]
    models[1].engine.check_integrity = True
    yield models
    for model in models:
        model.close()


@pytest.mark.parametrize("pair", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"], indirect=True)
def test_tokens_are_those_of_single_steps_for_any_options(pair):
    plain, speculative = pair
    prompts = repeating_prompts(8)
    mixes = [
        {},
        {"temperature": 0.4, "do_sample": True},
        {"temperature": 1.3, "top_k": 20, "do_sample": True},
        {"temperature": 0.8, "top_p": 0.7, "do_sample": True},
    ]
    asked = [request(prompt, seed=i, **mixes[i % 4]) for i, prompt in enumerate(prompts)]
    before = speculative.engine.stats()
    assert tokens_of(speculative, asked) == tokens_of(plain, asked)
    after = speculative.engine.stats()
    accepted = after.scheduler.num_accepted_tokens - before.scheduler.num_accepted_tokens
    assert 0 < accepted < after.scheduler.num_draft_tokens - before.scheduler.num_draft_tokens
    assert plain.engine.stats().scheduler.num_draft_tokens == 0
    assert f"{after.scheduler.num_accepted_tokens}/{after.scheduler.num_draft_tokens} drafts accepted" in str(after)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"logprobs": 2},
        {"no_repeat_ngram_size": 3},
        {"min_new_tokens": 4, "eos_token_id": 5},
        {"speculate": False},
        {"logit_bias": {7: 3.0}},
    ],
)
def test_requests_that_need_more_than_tokens_have_the_same_results(pair, options):
    prompts = repeating_prompts(3, seed=1)
    asked = [
        request(prompts[0], 40, **options),
        request(prompts[1]),
        request(prompts[2], 12, temperature=0.5, do_sample=True),
    ]
    num_drafted = pair[1].engine.stats().scheduler.num_draft_tokens
    assert answers_of(pair[1], asked) == answers_of(pair[0], asked)
    assert pair[1].engine.stats().scheduler.num_draft_tokens > num_drafted, "the others speculate beside it"


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9, "do_sample": True}])
def test_drafted_tokens_have_their_log_probabilities(pair, options):
    prompts = repeating_prompts(3, seed=9)
    asked = [
        request(prompts[0], logprobs=3, seed=1, **options),
        request(prompts[1], logprobs=0, **options),
        request(prompts[2], 12),
    ]
    before = pair[1].engine.stats().scheduler
    plain, speculative = (answers_of(model, asked) for model in pair)
    assert speculative == plain, "to the last bit"
    assert len(plain[0][1]) == 30 and len(plain[0][1][0].top) == 3 and not plain[2][1]
    after = pair[1].engine.stats().scheduler
    assert after.num_draft_tokens > before.num_draft_tokens
    assert options or after.num_accepted_tokens > before.num_accepted_tokens + 12, "best tokens repeat"


class Banned:
    """Forbids a token, whatever the answer is; notes the answers that it has been asked for."""

    def __init__(self, token):
        self.token, self.seen = token, []

    def fill(self, bitmask, output_ids):
        self.seen.append(list(output_ids))
        bitmask[self.token // 32] &= np.array(~(1 << self.token % 32), np.int64).astype(np.int32)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "do_sample": True, "logprobs": 2}])
def test_masked_requests_share_verify_steps(pair, options):
    prompts = repeating_prompts(3, seed=10)
    best = tokens_of(pair[0], [request(prompts[0], 1)])[0][0]
    answers = []
    for model in pair:
        num_accepted = model.engine.stats().scheduler.num_accepted_tokens
        masks = Banned(best)
        asked = [
            dataclasses.replace(request(prompts[0], 40, **options), masks=masks),
            *(request(each, 25) for each in prompts[1:]),
        ]
        answers.append(answers_of(model, asked))
        tokens = answers[-1][0][0]
        assert best not in tokens and masks.seen[:40] == [tokens[:num] for num in range(40)]
    assert answers[0] == answers[1]
    assert pair[1].engine.stats().scheduler.num_accepted_tokens > num_accepted


def test_stop_tokens_inside_drafts_end_the_answer_there(pair):
    plain, speculative = pair
    prompt = repeating_prompts(1, seed=2)[0]
    whole = tokens_of(plain, [request(prompt, 40)])[0]
    for stop in dict.fromkeys(whole):
        expected = whole[: whole.index(stop) + 1]
        assert tokens_of(speculative, [request(prompt, 40, stop_token_ids=[stop])])[0] == expected


def test_answers_end_at_the_longest_length(pair):
    plain, speculative = pair
    for length in (90, 94, 95):
        prompt = (repeating_prompts(1, seed=3)[0] * 9)[:length]
        asked = [request(prompt, 50)]
        got = tokens_of(speculative, asked)
        assert got == tokens_of(plain, asked) and len(got[0]) == 96 - length
    for number in range(1, 8):
        asked = [request(repeating_prompts(1, seed=4)[0], number)]
        assert tokens_of(speculative, asked) == tokens_of(plain, asked)


def test_prompts_in_chunks_and_prefix_hits_next_to_drafts(pair):
    plain, speculative = pair
    long = (repeating_prompts(1, seed=5)[0] * 8)[:60]
    asked = [request(prompt, 20, seed=i) for i, prompt in enumerate([long, *repeating_prompts(5, seed=6), long])]
    expected = tokens_of(plain, asked)
    got = [speculative.engine.submit(each) for each in asked]
    assert [handle.result() for handle in got] == expected
    longer = request(long + expected[0], 10)
    hits = speculative.engine.stats().scheduler.num_hit_tokens
    assert tokens_of(speculative, [longer]) == tokens_of(plain, [longer]), "pages of accepted drafts are shared"
    assert speculative.engine.stats().scheduler.num_hit_tokens - hits >= len(long)


@pytest.mark.parametrize("name", ["gemma3_text", thorough("mixtral"), thorough("gpt2")])
def test_other_architectures_and_few_pages_give_the_tokens_of_eager_transformers(name):
    options = dataclasses.replace(SIZES, speculative=NGRAM, kv_cache_memory_bytes=None, max_num_seqs=3)
    prompts = repeating_prompts(5, seed=7)
    with serve(tiny_model(name), engine=options) as model:
        model.engine.check_integrity = True
        got = tokens_of(model, [request(prompt, 24) for prompt in prompts])
        assert got == [expected_tokens(name, prompt, 24) for prompt in prompts]
        assert model.engine.stats().scheduler.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["qwen3", thorough("llama")])
def test_a_draft_model_changes_no_token(pair, name):
    plain, _ = pair
    dtype = plain.torch_model.dtype
    config = {"method": "draft_model", "model": tiny_model(name, dtype), "num_speculative_tokens": 3}
    options = dataclasses.replace(SIZES, speculative={**config, "adaptive": False})
    rng = random.Random(8)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in (1, 2, 9, 40, 60)]
    sampled = [request(prompt, 20, seed=i, temperature=0.7, do_sample=True) for i, prompt in enumerate(prompts)]
    asked = [*(request(prompt, 20) for prompt in prompts), *sampled, request(prompts[2], 20, speculate=False)]
    with serve(tiny_model("qwen3", dtype), engine=options) as model:
        model.engine.check_integrity = True
        assert tokens_of(model, asked) == tokens_of(plain, asked)
        stats = model.engine.stats().scheduler
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    if name == "qwen3":  # the same model draws the same tokens
        assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens


def test_a_draft_model_has_the_vocabulary_of_the_model():
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with pytest.raises(
        InvalidArgumentError, match="expected the vocabulary of the served model, 97 tokens, got another"
    ):
        serve(tiny_model("llama"), speculative_config={"method": "draft_model", "model": other})
    config = {"method": "draft_model", "model": tiny_model("mamba")}
    model = serve(tiny_model("llama"), speculative_config=config, engine=EngineOptions(max_model_len=64))
    with model, pytest.raises(UnsupportedArgumentError, match="that runs packed, got the model object:"):
        model.engine  # noqa: B018


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": "ngram"}, "model: expected None with method 'ngram', got LlamaForCausalLM"),
        ({"method": "eagle3"}, "speculative_config: model: the model is a LlamaForCausalLM, expected"),
        ({"method": "draft_model", "model": "/nowhere"}, "^speculative_config: model: there is no folder /nowhere"),
    ],
)
def test_a_draft_model_that_is_none_is_said_in_one_line(config, said):
    draft = tiny_model("llama")
    with pytest.raises((InvalidArgumentError, ModelNotFoundError), match=said) as caught:
        serve(tiny_model("llama"), speculative_config={"model": draft, **config})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_models_that_cannot_verify_drafts_refuse():
    config = transformers.T5Config(vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model = serve(transformers.T5ForConditionalGeneration(config), speculative_config=NGRAM)
    with model, pytest.raises(UnsupportedArgumentError, match="expected None for a model with an encoder") as error:
        model.engine  # noqa: B018
    assert "\n" not in str(error.value)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=61, **sizes))
    with pytest.raises(UnsupportedArgumentError, match="expected None for BertModel, which does not generate"):
        serve(encoder, speculative_config=NGRAM)


def test_options_are_given_once_and_checked():
    with pytest.raises(InvalidArgumentError, match="from 1 to 16, got 17"):
        serve(tiny_model("llama"), speculative_config={"num_speculative_tokens": 17})
    with pytest.raises(InvalidArgumentError, match="expected it once"):
        serve(tiny_model("llama"), engine=EngineOptions(speculative=NGRAM), speculative_config=NGRAM)
    with pytest.raises(InvalidArgumentError, match="speculate: expected True or False, got 1"):
        SamplingParams(speculate=1)
    with serve(tiny_model("llama"), speculative_config=NGRAM, engine=SIZES) as model:
        assert len(tokens_of(model, [request([5, 6, 7] * 4, 6)])[0]) == 6
        assert model.engine.stats().scheduler.num_draft_tokens > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_are_verified_with_the_adapter_of_their_row(tmp_path, method):
    """A draft model has no adapter: here it is the served model without one."""
    config = NGRAM if method == "ngram" else {**NGRAM, "method": method, "model": tiny_model("llama")}
    peft = PeftModels(tiny_model("llama"), tmp_path, ranks(3))
    prompts = repeating_prompts(4, seed=5)
    params = [SamplingParams(max_new_tokens=20, temperature=0.0, adapter=name) for name in (*peft.names, None)]
    engine = dataclasses.replace(SIZES, speculative=config)
    with serve(tiny_model("llama"), engine=engine, adapters=peft.folders(), max_lora_rank=4) as model:
        answers = [answer.token_ids for answer in model.generate_batch(prompts, params)]
        assert model.stats().scheduler.num_accepted_tokens > 0
    wanted = [peft.tokens(each.adapter, prompt, 20) for each, prompt in zip(params, prompts, strict=True)]
    assert answers == wanted
