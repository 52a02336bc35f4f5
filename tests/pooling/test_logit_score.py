"""Rerankers that generate: the logits of two tokens, beside those of the eager model.

The same files were compared with `CrossEncoder` of sentence-transformers 6.2, to 2e-7.
"""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from encoder_models import SPECIAL, TEXTS, WORDS, tokenizer, write
from weights import draw_matrices

from torchax_serve import CheckpointError, InvalidArgumentError, UnsupportedModelError, serve
from torchax_serve.pooling.logit_score import logit_score_rule

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
]

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}big {{ m.content }} {% endif %}"
    "{% if m.role == 'query' %}the {{ m.content }} {% endif %}{% if m.role == 'document' %}a {{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} home{% endif %}"
)
YES, NO = 10, 12
DOCUMENTS = [*TEXTS, "red rain"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A served Qwen3 with the files of a CrossEncoder, and the eager one."""
    path = tmp_path_factory.mktemp("reranker")
    config = transformers.Qwen3Config(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    eager = transformers.Qwen3ForCausalLM(config).eval()
    draw_matrices(eager, std=0.3)
    eager.save_pretrained(path)
    words = tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(path)
    modules = [("", "base.modules.transformer.Transformer"), ("1_LogitScore", "cross_encoder.modules.LogitScore")]
    write(path / "modules.json", [{"path": where, "type": f"sentence_transformers.{kind}"} for where, kind in modules])
    write(path / "1_LogitScore" / "config.json", {"true_token_id": YES, "false_token_id": NO})
    write(
        path / "sentence_bert_config.json",
        {
            "transformer_task": "text-generation",
            "modality_config": {"message": {"method": "forward", "method_output_name": "logits", "format": "flat"}},
            "module_output_name": "causal_logits",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
    )
    settings = {"prompts": {"web": "blue rain"}, "default_prompt_name": "web"}
    write(path / "config_sentence_transformers.json", settings | {"activation_fn": "torch.nn.Sigmoid"})
    with serve(path) as served:
        yield served, eager, path


def logits_after(eager, text):
    with torch.no_grad():
        ids = tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return eager(ids).logits[0, -1]


def test_pairs_are_scored_by_the_logits_of_yes_and_no(reranker):
    served, eager, _ = reranker
    rows = [logits_after(eager, f"big blue rain the cat sat a {text} home") for text in DOCUMENTS]
    expected = [float(torch.sigmoid(row[YES] - row[NO])) for row in rows]
    assert max(expected) - min(expected) > 0.05
    np.testing.assert_allclose(served.score_pairs([("cat sat", text) for text in DOCUMENTS]), expected, atol=1e-5)
    ranked = served.rerank("cat sat", DOCUMENTS, top_k=2)
    assert [each.index for each in ranked] == np.argsort(expected)[::-1][:2].tolist()


def test_pairs_are_scored_by_the_logit_of_yes_alone(reranker, tmp_path):
    _, eager, path = reranker
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    write(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": YES, "false_token_id": None})
    write(tmp_path / "config_sentence_transformers.json", {"activation_fn": "torch.nn.Identity"})
    expected = [float(logits_after(eager, f"the cat sat a {text} home")[YES]) for text in DOCUMENTS]
    with serve(tmp_path) as served:
        np.testing.assert_allclose(served.score_pairs([("cat sat", text) for text in DOCUMENTS]), expected, atol=1e-5)
    write(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": YES, "false_token_id": "no"})
    with pytest.raises(CheckpointError, match="expected the numbers of tokens"):
        logit_score_rule(tmp_path)


def test_probabilities_of_labels_are_those_of_the_model_card(reranker):
    """Log-softmax over the logits of no and yes behind a prompt of the caller, as Qwen3-Reranker's card computes it."""
    served, eager, _ = reranker
    prompts = ["the cat sat on", "a dog ran home and"]
    names = tokenizer().convert_ids_to_tokens([NO, YES])
    rows = [logits_after(eager, prompt)[[NO, YES]] for prompt in prompts]
    expected = torch.stack([torch.log_softmax(row, 0).exp() for row in rows])
    ids = [tokenizer()(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    np.testing.assert_allclose(served.label_scores(ids, names), expected.numpy(), atol=1e-5)
    for wrong in (["cat", "cat"], ["cat dog", "a"]):
        with pytest.raises(InvalidArgumentError, match="labels: expected different texts of one token each"):
            served.label_scores(ids, wrong)


def test_what_is_refused(reranker):
    served, _, path = reranker
    with pytest.raises(InvalidArgumentError, match="truncate: expected none"):
        served.score_pairs([("a", "b")], truncate=True)
    with pytest.raises(UnsupportedModelError, match=r"LogitScore, expected .*; pass pooling="):
        served.embed("a dog")
    texts = path / "sentence_bert_config.json"
    for file, changed, message in (
        (path / "config_sentence_transformers.json", {"activation_fn": "torch.nn.Tanh"}, "activation_fn is Tanh"),
        (texts, {"processing_kwargs": {"image": {}}}, "got image, which is not honoured"),
        (texts, {"transformer_task": "any-to-any"}, "got any-to-any"),
    ):
        before = file.read_text()
        write(file, json.loads(before) | changed)
        with pytest.raises(UnsupportedModelError, match=message):
            logit_score_rule(path)
        file.write_text(before)
    write(texts, json.loads(texts.read_text()) | {"max_seq_length": 12})
    assert logit_score_rule(path).max_len == 12
    with serve(path) as short, pytest.raises(InvalidArgumentError, match="at most 12 tokens with the template"):
        short.rerank("cat", [TEXTS[2]])
