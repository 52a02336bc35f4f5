"""``encoder_no_repeat_ngram_size``: n-grams of the encoder's input, or of the prompt, do not occur in the answer."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from sampler_oracle import Row, adjusted_scores
from transformers.generation import logits_process as hf
from weights import draw_matrices

from torchax_serve import EngineOptions, InvalidArgumentError, SamplingParams, serve, to_jax
from torchax_serve.sampling.forbidden_tokens import forbidden_tokens
from torchax_serve.sampling.sampler import Sampler

VOCAB_SIZE, NEW, START = 31, 10, 5
OPTIONS = EngineOptions(max_model_len=40, max_num_seqs=4, page_size=4, max_num_batched_tokens=20)
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_scores_are_those_of_the_processor(size):
    rng, sampler = np.random.default_rng(size), Sampler(2, VOCAB_SIZE)
    encoder = [START, *rng.integers(3, 7, 9).tolist()]
    processors = [
        hf.NoRepeatNGramLogitsProcessor(4),
        hf.EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([encoder])),
        hf.NoBadWordsLogitsProcessor([[4, 5], [5, 6, 3]]),
    ]
    row = Row({"no_repeat_ngram_size": 4, "bad_words_ids": [[4, 5], [5, 6, 3]]}, prompt=(START,))
    params = dataclasses.replace(row.params(VOCAB_SIZE), encoder_ngram_size=size).with_encoder_ids(encoder)
    sampler.assign_slot(1, params, row.prompt)
    num_changed = 0
    for _ in range(NEW):
        logits = rng.normal(size=(2, VOCAB_SIZE)).astype(np.float32)
        logits[:, 3:7] += 3
        ids, scores = torch.tensor([[*row.prompt, *row.outputs]]), torch.tensor(adjusted_scores(row, logits[0])[None])
        for processor in processors:
            scores = processor(ids, scores)
        token = int(sampler.sample([row.plan_row(1)], jnp.asarray(logits)).tokens[0])
        assert token == int(scores.argmax())
        forbidden = forbidden_tokens(params, ids[0].tolist(), 1, VOCAB_SIZE)
        banned = np.logical_or.reduce([np.zeros(VOCAB_SIZE, bool), *forbidden.values()])
        np.testing.assert_array_equal(banned, np.isneginf(scores[0].numpy()))
        num_changed += token != logits[0].argmax()
        row = Row(row.options, row.prompt, (*row.outputs, token))
    assert num_changed > 1


def made(model_type):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if model_type == "bart":
        of_sides = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
        sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in of_sides.items()}
        sizes |= {"d_model": 16, "max_position_embeddings": 64}
        sizes |= {"decoder_start_token_id": START, "forced_eos_token_id": None}
    config = transformers.AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **SPECIAL, **sizes)
    of_type = transformers.AutoModelForSeq2SeqLM if model_type == "bart" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = of_type.from_config(config).eval()
    draw_matrices(model, std=0.4)
    return model


def answers(model, prompts, size):
    """Tokens behind each prompt, by transformers."""
    given = {"max_new_tokens": NEW, "do_sample": False, "encoder_no_repeat_ngram_size": size}
    found = [model.generate(torch.tensor([ids]), **given)[0].tolist() for ids in prompts]
    return [ids[-NEW:] for ids in found]


@pytest.mark.parametrize("model_type", ["bart", "llama"])
def test_answers_are_those_of_transformers(model_type):
    eager = made(model_type)
    plain = answers(eager, [[7, 8, 9]], 0)[0]
    # The model's own answer is in the prompts, behind the decoder's first token in one of them.
    prompts = [[7, 8, 9], [START, *plain], [7, 8, *plain[:6], 9], [11]]
    with serve(made(model_type), engine=OPTIONS) as model:
        num_changed = 0
        for size in (1, 2, 3):
            expected = answers(eager, prompts, size)
            model.generation_config.encoder_no_repeat_ngram_size = size
            found = model.generate_batch(prompts, SamplingParams(max_new_tokens=NEW, temperature=0))
            assert [each.token_ids for each in found] == expected
            num_changed += expected != answers(eager, prompts, 0)
        assert 0 < model.engine.stats().num_steps < 2 * 3 * NEW, "requests share the engine's steps"
        assert num_changed > 1
        model.generation_config.encoder_no_repeat_ngram_size = -1
        with pytest.raises(InvalidArgumentError, match=r"encoder_no_repeat_ngram_size: expected .*, got -1"):
            model.generate_batch([[7, 8]], SamplingParams(max_new_tokens=NEW))


@pytest.mark.parametrize("model_type", ["bart", "llama"])
def test_generate_takes_it_too(model_type):
    eager = made(model_type)
    prompts = [[7, 8, 9], [START, *answers(eager, [[7, 8, 9]], 0)[0]]]
    assert answers(to_jax(made(model_type)), prompts, 2) == answers(eager, prompts, 2)
