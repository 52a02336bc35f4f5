"""Labels and ranks beside transformers' own pipelines and eager PyTorch."""

import numpy as np
import pytest
import torch
from encoder_models import TEXTS, folder, tokenizer, write
from transformers import pipeline

from torchax_serve import InvalidArgumentError, UnsupportedModelError, serve

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*return_all_scores:UserWarning"),
]
LABELS = {0: "good", 1: "bad", 2: "neither"}


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_classify_matches_the_pipeline(tmp_path, problem):
    eager = folder(tmp_path, "BertForSequenceClassification", id2label=LABELS, problem_type=problem)
    theirs = pipeline("text-classification", model=eager, tokenizer=tokenizer(), top_k=None)
    with serve(tmp_path) as served:
        for found, expected in zip(served.classify(TEXTS), theirs(TEXTS), strict=True):
            assert found.label == expected[0]["label"]
            for each in expected:
                assert found.scores[each["label"]] == pytest.approx(each["score"], abs=1e-5)
        assert served.classify(TEXTS[0]).label == theirs(TEXTS[:1])[0][0]["label"]
        with pytest.raises(UnsupportedModelError, match="with 3 labels; call classify"):
            served.rerank("cat", ["dog"])


def test_classify_tokens_matches_the_pipeline(tmp_path):
    eager = folder(tmp_path, "BertForTokenClassification", id2label=LABELS)
    theirs = pipeline("token-classification", model=eager, tokenizer=tokenizer(), ignore_labels=[])
    with serve(tmp_path) as served:
        for text, found in zip(TEXTS, served.classify_tokens(TEXTS), strict=True):
            expected = theirs(text)
            assert [(each.text, each.label) for each in found] == [(e["word"], e["entity"]) for e in expected]
            np.testing.assert_allclose([e.score for e in found], [e["score"] for e in expected], atol=1e-5)


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_rerank(tmp_path, activation):
    eager = folder(tmp_path, "BertForSequenceClassification", num_labels=1)
    if activation is not None:
        config = eager.config.to_dict() | {"sentence_transformers": {"activation_fn": activation}}
        write(tmp_path / "config.json", config)
    with torch.no_grad():
        pairs = [tokenizer()("the cat", text, return_tensors="pt") for text in TEXTS]
        scores = np.array([eager(**pair).logits.item() for pair in pairs])
    if activation is None:
        scores = 1 / (1 + np.exp(-scores))
    with serve(tmp_path) as served:
        found = served.rerank("the cat", TEXTS)
        assert [each.index for each in found] == np.argsort(-scores).tolist()
        np.testing.assert_allclose([each.score for each in found], np.sort(scores)[::-1], atol=1e-4)
        assert served.rerank("the cat", TEXTS, top_k=1) == found[:1]
        with pytest.raises(InvalidArgumentError, match="documents: expected a list of texts"):
            served.rerank("the cat", "a dog")
        with pytest.raises(InvalidArgumentError, match="query: expected some text"):
            served.rerank("", TEXTS)
        with pytest.raises(InvalidArgumentError, match="top_k: expected a positive number"):
            served.rerank("the cat", TEXTS, top_k=0)
        with pytest.raises(InvalidArgumentError, match=r"texts\[0\]: expected at most 64 tokens"):
            served.rerank("the cat", ["cat " * 80], truncate=False)


def test_pairs_that_are_too_long_are_cut_as_by_the_tokenizer(tmp_path, caplog):
    eager = folder(tmp_path, "BertForSequenceClassification", num_labels=1)
    words = "dog " * 80
    pair = tokenizer()("the cat", words, truncation="longest_first", max_length=64, return_tensors="pt")
    with torch.no_grad():
        expected = torch.sigmoid(eager(**pair).logits).item()
    with serve(tmp_path) as served:
        for _ in range(2):
            (found,) = served.rerank("the cat", [words])
            assert found.score == pytest.approx(expected, abs=1e-4)
        assert served.rerank("the cat", [words], truncate=True) == [found]
    said = [each.getMessage() for each in caplog.records if each.name == "torchax_serve"]
    assert said == [f"{tmp_path}: pairs are cut to 64 tokens, as by sentence-transformers; 1 of 1 are longer"]


def test_activation_from_the_file_of_sentence_transformers(tmp_path):
    folder(tmp_path, "BertForSequenceClassification", num_labels=1)
    with serve(tmp_path) as served:
        by_sigmoid = served.rerank("the cat", TEXTS[:1])[0].score
    write(tmp_path / "config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.linear.Identity"})
    with serve(tmp_path) as served:
        plain = served.rerank("the cat", TEXTS[:1])[0].score
    assert 1 / (1 + np.exp(-plain)) == pytest.approx(by_sigmoid, abs=1e-5)
