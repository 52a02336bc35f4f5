"""The beams of transformers' ``generate``, found on the log-probabilities of the likeliest tokens."""

import itertools

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from torchax_serve.sampling.beam_search import BeamOptions, BeamSearch

VOCAB_SIZE, PROMPT = 23, [3, 8, 1]


@pytest.fixture(scope="module")
def eager():
    torch.manual_seed(5)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB_SIZE}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(12)  # so that beams differ
    return model


def beams_of(model, options):
    """All ended sequences by `BeamSearch`, with logits of the whole sequence in each step."""
    search = BeamSearch(options)
    while not search.is_done:
        ids = torch.tensor([[*PROMPT, *beam.token_ids] for beam in search.running])
        with torch.no_grad():
            logprobs = model(ids).logits[:, -1].log_softmax(-1)
        values, tokens = logprobs.topk(min(options.num_candidates, VOCAB_SIZE))
        search.advance([list(zip(*each, strict=True)) for each in zip(tokens.tolist(), values.tolist(), strict=True)])
    return search.ended


SETTINGS = list(itertools.product((1, 2, 4), ((0,), (0, 7, 11), ()), (1.0, 0.0, 2.0, -1.0), (False, True, "never")))


@pytest.mark.parametrize(("num_beams", "eos", "length_penalty", "early_stopping"), SETTINGS)
def test_beams_are_those_of_generate(eager, num_beams, eos, length_penalty, early_stopping):
    options = BeamOptions(num_beams, 9, frozenset(eos), length_penalty, early_stopping)
    ids = torch.tensor([PROMPT])
    expected = eager.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=9,
        eos_token_id=list(eos) or None,
        pad_token_id=22,
        do_sample=False,
        **({"length_penalty": length_penalty, "early_stopping": early_stopping} if num_beams > 1 else {}),
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = beams_of(eager, options)
    assert len(found) == num_beams
    for beam, row in zip(found, expected.sequences[:, len(PROMPT) :].tolist(), strict=True):
        length = len(beam.token_ids)
        assert list(beam.token_ids) == row[:length]
        assert set(row[length:]) <= {22, *eos} and (length == 9 or beam.token_ids[-1] in eos)
    if num_beams > 1:
        scores = [float(beam.score) for beam in found]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=1e-4)
