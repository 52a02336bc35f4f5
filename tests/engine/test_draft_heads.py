"""Draft heads on the engine: their proposals are those of eager PyTorch, and no token changes."""

import dataclasses
import json
import re
import shutil

import jax
import pytest
import torch
import transformers
from draft_head_oracle import Eagle3, Mtp, PrefixedMtp, proposals, trained
from engine_models import VOCAB_SIZE
from headed_models import NUM_NEW, deeper, hybrid, llama, prompts, text_of
from safetensors.torch import load_file, save_file
from speculation_requests import request, tokens_of
from thorough import thorough

from model_adapters.draft_heads.loading import load_eagle3
from model_adapters.errors import TorchaxServeError
from model_adapters.loading import load_model
from model_adapters.loading.model_source import ModelSource
from torchax_serve import EngineOptions, serve
from torchax_serve.executors.speculation.draft_head import DraftHead

SIZES = EngineOptions(
    max_model_len=96, max_num_seqs=4, page_size=8, max_num_batched_tokens=32, max_num_steps=4, batch_invariant=True
)
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory):
    """A trained head, its folder, and the texts that it has learned."""
    model = llama()
    texts = [text_of(model, prompt) for prompt in prompts()]
    seen = {token for text in texts for token in text}
    ids = torch.tensor(sorted(seen | set(range(0, VOCAB_SIZE, 5)))[:-1])  # of one text it has not all tokens
    head = trained(Eagle3(model, ids), texts)
    return head, head.save(tmp_path_factory.mktemp("head") / "eagle3"), texts


@pytest.fixture
def recorded(monkeypatch):
    """What heads propose: by length of the text, the drafts of each row."""
    seen = []
    own = DraftHead.propose

    def propose(self, head, pools, rows, steps, pick):
        drafts, is_found, pools = own(self, head, pools, rows, steps, pick)
        jax.debug.callback(lambda *values: seen.append(values), rows.ids, rows.lens, drafts, is_found, steps.ends)
        return drafts, is_found, pools

    monkeypatch.setattr(DraftHead, "propose", propose)
    return seen


def check_proposals(model, head, seen, texts):
    """Compares all proposals that are verified with greedy drafts of eager PyTorch."""
    asked = [request(text[:-NUM_NEW], NUM_NEW) for text in texts]
    assert tokens_of(model, asked) == [text[-NUM_NEW:] for text in texts]
    jax.effects_barrier()
    found = {}
    for ids, lens, drafts, is_found, ends in seen:
        for row in is_found.nonzero()[0]:
            text, most = tuple(ids[row, : lens[row]].tolist()), max(ends[row] - lens[row], 0)
            found[text] = drafts[row, :most].tolist()
    assert len(found) >= 2 * len(texts)
    assert found == {text: proposals(head, list(text), NUM_DRAFTS)[: len(drafts)] for text, drafts in found.items()}


@pytest.mark.thorough
def test_eagle3_proposes_what_eager_pytorch_does(eagle3, recorded):
    head, folder, texts = eagle3
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    with serve(llama(), speculative_config=config, engine=SIZES) as model:
        model.engine.check_integrity = True
        check_proposals(model, head, recorded, texts)
        stats = model.stats().scheduler
    assert 0.3 * stats.num_draft_tokens < stats.num_accepted_tokens <= stats.num_draft_tokens


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="float32"), thorough(torch.bfloat16, name="bfloat16")]
)
def test_eagle3_changes_no_token(eagle3, dtype):
    _, folder, texts = eagle3
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    wanted = [text[:-NUM_NEW] for text in texts] + prompts((1, 17, 60))
    sampled = [request(prompt, 20, seed=i, temperature=0.7, do_sample=True) for i, prompt in enumerate(wanted)]
    asked = [*(request(prompt, NUM_NEW) for prompt in wanted), *sampled, request(wanted[0], 20, speculate=False)]
    further = [request(wanted[-1] + [7], 12), request(wanted[1], 8, logprobs=1)]  # a prefix hit; no drafts beside it
    with serve(llama(dtype), engine=SIZES) as plain:
        expected = [tokens_of(plain, each) for each in (asked, further)]
    with serve(llama(dtype), speculative_config=config, engine=SIZES) as model:
        model.engine.check_integrity = True
        assert [tokens_of(model, each) for each in (asked, further)] == expected
        stats = model.stats().scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(
    "model_type",
    # The second has latent attention, those behind it indexers, whose tokens a layer of GLM-5 takes of the one before.
    [thorough("glm4_moe"), "deepseek_v3", "deepseek_v32", thorough("glm_moe_dsa")],
)
def test_mtp_proposes_what_eager_pytorch_does(model_type, tmp_path, recorded):
    whole = deeper(model_type)
    untrained = Mtp(whole).save(tmp_path / "untrained")
    eager = transformers.AutoModelForCausalLM.from_pretrained(untrained, attn_implementation="eager")
    texts = [text_of(eager, prompt) for prompt in prompts()]
    head = trained(Mtp(whole), texts)
    folder = head.save(tmp_path / "trained")
    config = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    with serve(folder, speculative_config=config, engine=SIZES) as model:
        model.engine.check_integrity = True
        check_proposals(model, head, recorded, texts)
        stats = model.stats().scheduler
        sampled = [request(text[:9], 20, seed=i, temperature=0.7, do_sample=True) for i, text in enumerate(texts)]
        drawn = tokens_of(model, sampled)
    assert 0.3 * stats.num_draft_tokens < stats.num_accepted_tokens <= stats.num_draft_tokens
    with serve(folder, engine=SIZES) as plain:
        assert tokens_of(plain, sampled) == drawn


@pytest.mark.parametrize("model_type", ["qwen3_next", thorough("qwen3_5_text")])
def test_the_head_of_a_model_with_recurrent_states_proposes_what_eager_pytorch_does(model_type, tmp_path, recorded):
    model = hybrid(model_type)
    texts = [text_of(model, prompt) for prompt in prompts()]
    head = trained(PrefixedMtp(model), texts)
    folder = head.save(tmp_path / "trained")
    config = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    sizes = dataclasses.replace(SIZES, batch_invariant=False)
    with serve(folder, speculative_config=config, engine=sizes) as served:
        served.engine.check_integrity = True
        check_proposals(served, head, recorded, texts)
        stats = served.stats().scheduler
        sampled = [request(text[:9], 20, seed=i, temperature=0.7, do_sample=True) for i, text in enumerate(texts)]
        drawn = tokens_of(served, sampled)
    assert 0.3 * stats.num_draft_tokens < stats.num_accepted_tokens <= stats.num_draft_tokens
    with serve(folder, engine=sizes) as plain:
        assert tokens_of(plain, sampled) == drawn


@pytest.mark.thorough
def test_eagle3_drafts_for_a_model_with_recurrent_states(tmp_path, recorded):
    model = hybrid()
    texts = [text_of(model, prompt) for prompt in prompts()]
    head = Eagle3(model, torch.arange(0, VOCAB_SIZE, 2))
    folder = head.save(tmp_path / "eagle3")
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    sizes = dataclasses.replace(SIZES, batch_invariant=False)
    with serve(hybrid(), speculative_config=config, engine=sizes) as served:
        check_proposals(served, head, recorded, texts)


def refusal(config, model):
    with pytest.raises(TorchaxServeError) as error:
        serve(model, speculative_config=config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_heads_of_other_models_are_refused(eagle3, tmp_path):
    head, folder, _ = eagle3
    config = {"method": "eagle3", "model": str(folder)}
    assert "3 hidden states of 64 columns, the served model's, got fc with 96" in refusal(config, llama(hidden_size=64))
    assert "served model, 101 tokens, got another of 97" in refusal(config, llama(vocab_size=101))
    assert "expected the name or folder of an EAGLE-3 head, got None" in refusal({"method": "eagle3"}, llama())
    assert "expected None with method 'mtp'" in refusal({"method": "mtp", "model": "x"}, llama())
    assert "from 1 to 16, got 0" in refusal({**config, "num_speculative_tokens": 0}, llama())
    assert "from 1 to 16, got 17" in refusal({**config, "num_speculative_tokens": 17}, llama())
    assert "got 'eagle'; EAGLE heads are not supported" in refusal({"method": "eagle"}, llama())
    other = {"method": "eagle3", "model": str(head.save(tmp_path / "a", eagle_aux_hidden_state_layer_ids=[0, 1, 3]))}
    assert "each from 0 to 2, got [0, 1, 3] in eagle_aux_hidden_state_layer_ids" in refusal(other, llama())
    other["model"] = str(head.save(tmp_path / "b", norm_before_fc=True))
    assert "expected an EAGLE-3 head without norm_before_fc" in refusal(other, llama())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc.weight": None}, "expected an EAGLE-3 head, whose tensors have fc.weight"),
        ({"midlayer.self_attn.o_proj.weight": None}, "1 missing: midlayer.self_attn.o_proj.weight"),
        ({"midlayer.mlp.up_proj.weight": torch.zeros(8, 32)}, r"up_proj.weight \[8, 32\], expected \[64, 32\]"),
        ({"further.weight": torch.zeros(2)}, "1 without a place: further.weight"),
        ({"d2t": None}, "expected d2t"),
        ({"d2t": torch.full((10,), 96)}, "d2t"),
    ],
)
def test_damaged_heads_are_refused(eagle3, tmp_path, changes, message):
    folder = shutil.copytree(eagle3[1], tmp_path / "head")
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")
    assert re.search(message, refusal({"method": "eagle3", "model": str(folder)}, llama()))


def test_a_head_is_the_same_by_the_names_of_other_libraries(eagle3, tmp_path):
    folder = shutil.copytree(eagle3[1], tmp_path / "head")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    known = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    top = {name: config.pop(name) for name in known} | {"architectures": ["Eagle3Speculator"]}
    (folder / "config.json").write_text(json.dumps({**top, "transformer_layer_config": config}))
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    target = load_model(llama())
    ours, theirs = (
        load_eagle3(ModelSource("folder", "a head", path), target, allow_pickle=False) for path in (eagle3[1], folder)
    )
    assert ours.layers == theirs.layers and ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.weights.keys() == theirs.weights.keys() and ours.shared == theirs.shared
    assert all((ours.weights[name] == theirs.weights[name]).all() for name in ours.weights)
    # SGLang counts the layers that return the hidden states.
    (folder / "config.json").write_text(
        json.dumps({**top, "eagle_aux_hidden_state_layer_ids": None, **config, "eagle_config": {known[1]: [0, 0, 1]}})
    )
    assert load_eagle3(ModelSource("folder", "a head", folder), target, allow_pickle=False).layers == (1, 1, 2)


def test_checkpoints_without_prediction_layers_are_refused(tmp_path):
    model = llama()
    assert "expected a model with a folder of safetensors files" in refusal({"method": "mtp"}, model)
    model.save_pretrained(tmp_path / "llama")
    message = refusal({"method": "mtp"}, tmp_path / "llama")
    assert (
        "expected a checkpoint with a prediction layer, model.layers.3.eh_proj.weight or mtp.fc.weight, got none"
        in message
    )
    file = tmp_path / "llama" / "model.safetensors"
    two = {f"mtp.layers.{number}.mlp.up_proj.weight": torch.zeros(2) for number in range(2)}
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(2), **two}, file, metadata={"format": "pt"})
    assert "one layer mtp.layers.0, as Qwen3-Next has them, got layers [0, 1]" in refusal(
        {"method": "mtp"}, tmp_path / "llama"
    )
