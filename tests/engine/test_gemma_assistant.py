"""Gemma 4's assistant on the engine: the tokens of the model, and the drafts that its own code writes."""

import dataclasses

import pytest
import torch
import transformers
from engine_models import tiny_model
from speculation_requests import request

from torchax_serve import EngineOptions, InvalidArgumentError, serve

VOCAB, WINDOW, NUM_DRAFTS = 13, 8, 3
SIZES = EngineOptions(max_model_len=96, max_num_seqs=2, page_size=8, max_num_batched_tokens=32, max_num_steps=4)
TEXT = {
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}


def target_model():
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma4TextConfig(**TEXT, hidden_size=32, num_hidden_layers=4, layer_types=kinds)
    return spread(transformers.Gemma4ForCausalLM(config).eval())


def assistant_model():
    torch.manual_seed(1)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    text = transformers.Gemma4TextConfig(**TEXT, hidden_size=16, num_hidden_layers=3, layer_types=kinds)
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32)
    return spread(transformers.Gemma4AssistantForCausalLM(config).eval())


def spread(model):
    """Draws matrices so large that texts are not one token over and over."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def drafts_right(target, assistant, text, prompt_len):
    """Returns how many drafts are accepted on the way through a greedy `text`, by the code of transformers."""
    length, accepted = prompt_len + 1, 0
    embed = target.get_input_embeddings()
    while length < len(text):
        before = target(torch.tensor([text[: length - 1]]), output_hidden_states=True, return_shared_kv_states=True)
        keys = {kind: tuple(each) for kind, each in before.shared_kv_states.items()}
        # The token itself has a place in its window, but no keys yet.
        keys["sliding_attention"] = tuple(each[:, :, 1 - WINDOW :] for each in keys["sliding_attention"])
        hidden, token, right = before.hidden_states[-1][:, -1:], text[length - 1], 0
        for wanted in text[length : min(length + NUM_DRAFTS, len(text) - 1)]:
            out = assistant(
                inputs_embeds=torch.cat((embed(torch.tensor([[token]])), hidden), dim=-1),
                position_ids=torch.tensor([[length - 1]]),
                shared_kv_states=keys,
            )
            token, hidden = int(out.logits[0, -1].argmax()), out.last_hidden_state
            if token != wanted:
                break
            right += 1
        accepted, length = accepted + right, length + right + 1
    return accepted


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_drafts_of_the_assistant_are_those_of_transformers(method):
    target, assistant = target_model(), assistant_model()
    config = {"method": method, "model": assistant, "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    prompts = [[3, 5, 7], [2, 4, 6, 8, 10, 12, 1, 3, 5, 7, 9, 11]]
    with torch.no_grad():
        texts = [
            target.generate(torch.tensor([each]), max_new_tokens=40, do_sample=False)[0].tolist() for each in prompts
        ]
        right = [drafts_right(target, assistant, text, len(each)) for text, each in zip(texts, prompts, strict=True)]
    assert sum(right) > 0
    with serve(target, engine=dataclasses.replace(SIZES, speculative=config)) as model:
        model.engine.check_integrity = True
        accepted = []
        for prompt, text in zip(prompts, texts, strict=True):
            before = model.engine.stats().scheduler.num_accepted_tokens
            assert model.engine.submit(request(prompt, 40, vocab_size=VOCAB)).result() == text[len(prompt) :]
            accepted.append(model.engine.stats().scheduler.num_accepted_tokens - before)
        assert accepted == right


def test_an_assistant_of_another_model_is_refused():
    config = {"method": "mtp", "model": assistant_model()}
    with pytest.raises(InvalidArgumentError, match="expected a draft model for LlamaForCausalLM, got"):
        serve(tiny_model("llama"), engine=SIZES, speculative_config=config)
    with pytest.raises(InvalidArgumentError, match="expected None or an assistant of Gemma 4 with method 'mtp'"):
        serve(target_model(), engine=SIZES, speculative_config=config | {"model": target_model()})
