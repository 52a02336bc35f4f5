"""Gemma 4's assistant on the engine: it drafts what transformers' own generator does, and no token changes."""

import copy
import random

import jax
import numpy as np
import pytest
import torch
import transformers
from engine_models import tiny_model
from gemma_models import NUM_NEW, PROMPTS, VOCAB, WINDOW, assistant_model, generated, target_model
from safetensors.torch import load_file, save_file
from speculation_requests import request, tokens_of
from thorough import thorough
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from model_adapters.errors import TorchaxServeError
from torchax_serve import EngineOptions, serve
from torchax_serve.executors.speculation.draft_assistant import DraftAssistant

NUM_DRAFTS = 3
SIZES = EngineOptions(max_model_len=96, max_num_seqs=4, page_size=8, max_num_batched_tokens=32, max_num_steps=4)


def candidates(target, assistant, text):
    """Returns the drafts behind `text` by transformers' generator, which is shown what the last token may see."""
    before = target(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    # Its caches keep of sliding layers what the next token sees: the window without that token.
    sliding = before.shared_kv_states["sliding_attention"]
    before.shared_kv_states["sliding_attention"] = tuple(each[:, :, 1 - WINDOW :] for each in sliding)
    config = transformers.GenerationConfig(max_length=len(text) + NUM_DRAFTS + 1)
    generator = SinglePositionMultiTokenCandidateGenerator(assistant, target.get_input_embeddings(), config)
    generator.num_assistant_tokens = NUM_DRAFTS
    ids, _ = generator.get_candidates(torch.tensor([text]), {}, before, is_first_iteration=False, n_last_matches=0)
    return ids[0, len(text) :].tolist()


def num_accepted(target, assistant, text, length):
    """Returns how many drafts are accepted on the way through a greedy `text` whose first token is computed."""
    accepted, length = 0, length + 1
    while length < len(text):
        room = len(text) - 1 - length  # the last token is drawn, not drafted
        drafts, right = candidates(target, assistant, text[:length])[:room], 0
        while right < len(drafts) and drafts[right] == text[length + right]:
            right += 1
        accepted, length = accepted + right, length + right + 1
    return accepted


@pytest.fixture
def recorded(monkeypatch):
    """What the assistant proposes: the drafts behind each text."""
    seen = {}
    own = DraftAssistant.propose

    def note(*arrays):
        ids, lens, drafts, is_found = map(np.asarray, arrays)  # operations of JAX in a callback would wait for it
        for row in is_found.nonzero()[0]:
            seen[tuple(ids[row, : lens[row]].tolist())] = drafts[row].tolist()

    def propose(self, head, pools, rows, steps, pick):
        drafts, is_found, pools = own(self, head, pools, rows, steps, pick)
        jax.debug.callback(note, rows.ids, rows.lens, drafts, is_found)
        return drafts, is_found, pools

    monkeypatch.setattr(DraftAssistant, "propose", propose)
    return seen


def speculation(assistant, **settings):
    config = {"method": "mtp", "model": assistant, "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    return {**config, **settings}


@pytest.mark.parametrize(("kind", "method"), [("Gemma4", "mtp"), thorough("Gemma4Unified", "draft_model")])
@torch.no_grad()
def test_the_assistant_drafts_what_transformers_does(recorded, kind, method):
    target, assistant = target_model(kind), assistant_model(kind)
    texts = [generated(target, each) for each in PROMPTS]
    wanted = [num_accepted(target, assistant, text, len(each)) for text, each in zip(texts, PROMPTS, strict=True)]
    served = copy.deepcopy(target)  # calls of a served model run on JAX; `target` stays eager
    with serve(served, engine=SIZES, speculative_config=speculation(assistant, method=method)) as model:
        model.engine.check_integrity = True
        accepted = []
        for prompt, text in zip(PROMPTS, texts, strict=True):
            before = model.stats().scheduler.num_accepted_tokens
            asked = [request(prompt, NUM_NEW, vocab_size=VOCAB)]
            assert tokens_of(model, asked) == [text[len(prompt) :]]
            accepted.append(model.stats().scheduler.num_accepted_tokens - before)
        jax.effects_barrier()
    assert accepted == wanted and 0 < sum(wanted) < NUM_NEW
    assert len(recorded) > NUM_NEW and len({tuple(each) for each in recorded.values()}) > 10
    assert recorded == {text: candidates(target, assistant, list(text)) for text in recorded}


def test_the_assistant_changes_no_token():
    target, draw = target_model(), random.Random(2)
    prompts = [[draw.randrange(VOCAB) for _ in range(size)] for size in (1, 9, 40, 2, 17)]
    greedy = [request(each, 24, vocab_size=VOCAB) for each in prompts]
    sampled = [
        request(each, 24, seed=i, vocab_size=VOCAB, temperature=0.7, do_sample=True) for i, each in enumerate(prompts)
    ]
    prefix_hit = [request(prompts[2] + [7], 12, vocab_size=VOCAB), request(prompts[1], 8, vocab_size=VOCAB, logprobs=1)]
    with serve(target, engine=SIZES) as plain:
        expected = [tokens_of(plain, each) for each in (greedy + sampled, prefix_hit)]
    with serve(target, engine=SIZES, speculative_config=speculation(assistant_model())) as model:
        model.engine.check_integrity = True
        assert [tokens_of(model, each) for each in (greedy + sampled, prefix_hit)] == expected
        stats = model.stats().scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def refusal(config, model):
    with pytest.raises(TorchaxServeError) as error:
        serve(model, engine=SIZES, speculative_config=config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_assistant_of_another_model_is_refused():
    target, own = target_model(), speculation(assistant_model())
    for method in ("mtp", "draft_model"):
        assert "for LlamaForCausalLM, got" in refusal({**own, "method": method}, tiny_model("llama"))
    itself = refusal(speculation(target_model()), target)
    assert "an assistant of Gemma 4 with method 'mtp', got the model object; use method 'draft_model'" in itself
    wider = refusal(speculation(assistant_model(backbone=48)), target)
    assert "{'hidden_size': 32, 'vocab_size': 12}, got {'hidden_size': 48, 'vocab_size': 12}" in wider
    assert "'vocab_size': 16}" in refusal(speculation(assistant_model(vocab_size=16)), target)
    other = refusal(speculation(assistant_model(global_head_dim=32)), target)
    assert "expected 2 heads of 32 columns in the served model's layers of full_attention" in other
    assert "from 1 to 16, got 0" in refusal(speculation(assistant_model(), num_speculative_tokens=0), target)
    assert "from 1 to 16, got 17" in refusal(speculation(assistant_model(), num_speculative_tokens=17), target)


def test_a_damaged_assistant_is_refused(tmp_path):
    assistant_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["pre_projection.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = refusal(speculation(str(tmp_path)), target_model())
    assert "expected all tensors of the draft model, 1 missing: pre_projection.weight" in message
