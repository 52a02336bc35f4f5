"""Bundles of models that read texts: as eager transformers and sentence-transformers, in a process without PyTorch."""

import json

import encoder_models
import numpy as np
import pytest
import torch
import transformers
from encoder_models import TEXTS, tokenizer
from exported import FEW, output_of, run
from safetensors.torch import save_file
from typer.testing import CliRunner

from torchax_serve import EngineOptions, InvalidArgumentError, UnsupportedModelError, serve
from torchax_serve.cli.main import app

SIZES = EngineOptions(max_model_len=24, max_num_seqs=2)
TEXTS = [*TEXTS, "The CAT ran"]
ANSWERS = """
import json, sys
from torchax_serve import serve
with serve(sys.argv[1]) as model:
    found = getattr(model, sys.argv[2])(*json.loads(sys.argv[3]), **json.loads(sys.argv[4]))
print(json.dumps(found.tolist() if hasattr(found, "tolist") else [vars(each) for each in found]))
"""


def answer(bundle, method, *args, **kwargs):
    """What a process gives that may not import PyTorch, transformers, or what only the command line needs."""
    return json.loads(output_of(ANSWERS, bundle, method, json.dumps(args), json.dumps(kwargs), refused=FEW))


def written(folder, out, **options):
    with serve(folder, dtype="float32") as model:
        model.export(out, engine=SIZES, native=False, **options)
    return out


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A folder with files of sentence-transformers: lower case, a prompt, mean pooling, a dense layer, length 1."""
    folder = tmp_path_factory.mktemp("embedder")
    model = encoder_models.folder(folder, "BertModel")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    dense = {"in_features": 32, "out_features": 8, "bias": True, "activation_function": "torch.nn.modules.Tanh"}
    for name, content in {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 20, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"query": "find the "}},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": dense,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    torch.manual_seed(1)
    weights = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    return folder, model, weights


@torch.no_grad()
def eager_embeddings(model, weights, texts):
    found = []
    for text in texts:
        ids = tokenizer()(text.lower(), return_tensors="pt", truncation=True, max_length=20)
        pooled = model(**ids).last_hidden_state.mean(1)
        made = torch.tanh(pooled @ weights["linear.weight"].T + weights["linear.bias"])
        found.append(torch.nn.functional.normalize(made)[0].numpy())
    return np.stack(found)


def test_embeddings_without_pytorch(embedder, tmp_path):
    folder, model, weights = embedder
    bundle = written(folder, tmp_path / "out")
    texts = [*TEXTS, "the cat " * 30]
    np.testing.assert_allclose(answer(bundle, "embed", texts), eager_embeddings(model, weights, texts), atol=1e-5)
    asked = answer(bundle, "embed", TEXTS, prompt_name="query")
    wanted = eager_embeddings(model, weights, [f"find the {text}" for text in TEXTS])
    np.testing.assert_allclose(asked, wanted, atol=1e-5)
    found = CliRunner().invoke(app, ["embed", str(bundle), *TEXTS, "--json"])
    assert found.exit_code == 0, found.stderr
    rows = [each["embedding"] for each in json.loads(found.stdout)["embeddings"]]
    np.testing.assert_allclose(rows, eager_embeddings(model, weights, TEXTS), atol=1e-5)
    with serve(folder) as served, serve(bundle) as exported:
        for options in ({"pooling": "cls"}, {"truncate_dim": 3}, {"pooling": "max", "normalize": True}):
            wanted = served.embed(TEXTS, **options)
            np.testing.assert_allclose(exported.embed(TEXTS, **options), wanted, atol=1e-5)
        wanted = served.embed([[1, 5, 6, 2]], pooling="mean")
        np.testing.assert_allclose(exported.embed([[1, 5, 6, 2]], pooling="mean"), wanted, atol=1e-5)
        assert exported.warm_up_texts() is None
        assert exported._program.num_programs == 6  # one and two rows of 8, 16 and 24 tokens
        with pytest.raises(InvalidArgumentError, match=r"texts\[0\]: expected at most 20 tokens, got 62"):
            exported.embed(["the cat " * 30], truncate=False)
        with pytest.raises(InvalidArgumentError, match="expected token ids from 0 to 24, got 99"):
            exported.embed([[1, 99]])
        with pytest.raises(UnsupportedModelError, match="expected a model that classifies texts"):
            exported.classify(TEXTS)


@pytest.mark.thorough
def test_labels_and_scores_without_pytorch(tmp_path):
    labels = {0: "cold", 1: "warm", 2: "hot"}
    model = encoder_models.folder(tmp_path / "classes", "BertForSequenceClassification", id2label=labels)
    found = answer(written(tmp_path / "classes", tmp_path / "out"), "classify", TEXTS)
    for text, each in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            scores = model(**tokenizer()(text, return_tensors="pt")).logits[0].softmax(-1).tolist()
        assert each["label"] == labels[int(np.argmax(scores))]
        np.testing.assert_allclose(list(each["scores"].values()), scores, atol=1e-5)

    scorer = encoder_models.folder(tmp_path / "pairs", "BertForSequenceClassification", num_labels=1)
    bundle = written(tmp_path / "pairs", tmp_path / "scores")
    query = "a dog"
    with torch.no_grad():
        wanted = [
            scorer(**tokenizer()(query, text, return_tensors="pt")).logits[0, 0].sigmoid().item() for text in TEXTS
        ]
    ranked = answer(bundle, "rerank", query, TEXTS)
    assert [each["index"] for each in ranked] == sorted(range(len(TEXTS)), key=lambda index: -wanted[index])
    np.testing.assert_allclose([each["score"] for each in ranked], sorted(wanted, reverse=True), atol=1e-5)

    encoder_models.folder(tmp_path / "tokens", "BertForTokenClassification", id2label=labels)
    with serve(tmp_path / "tokens") as served, serve(written(tmp_path / "tokens", tmp_path / "words")) as exported:
        for mine, theirs in zip(exported.classify_tokens(TEXTS), served.classify_tokens(TEXTS), strict=True):
            assert [(each.text, each.label) for each in mine] == [(each.text, each.label) for each in theirs]
        with pytest.raises(UnsupportedModelError, match="whose programs return labels"):
            exported.embed(TEXTS, pooling="mean")


def test_what_a_bundle_of_an_encoder_refuses(embedder, tmp_path):
    bundle = written(embedder[0], tmp_path / "out")
    with pytest.raises(
        InvalidArgumentError, match="max_model_len: expected 20, as the bundle was exported with, got 9"
    ):
        serve(bundle, engine=EngineOptions(max_model_len=9))
    done = run("from torchax_serve.cli.main import main; sys.exit(main())", "run", bundle, "Hello", refused="torch")
    assert done.returncode != 0
    assert "run: expected a model that writes text" in done.stderr
    info = CliRunner().invoke(app, ["bundle", "info", str(bundle)])
    assert "max_model_len=20, max_num_seqs=2" in info.stdout
    found = CliRunner().invoke(app, ["bundle", "verify", str(bundle), "--model", str(embedder[0])])
    assert found.exit_code == 0, found.stderr
    assert "last_hidden_state of 3 texts differs from eager PyTorch" in found.stdout
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, pad_token_id=None)
    with (
        serve(transformers.GPT2ForSequenceClassification(config).eval()) as model,
        pytest.raises(UnsupportedModelError, match="expected texts in padded batches"),
    ):
        model.export(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    encoder_models.folder(tmp_path / "plain", "BertModel")
    with serve(written(tmp_path / "plain", tmp_path / "plain-out")) as exported:
        with pytest.raises(InvalidArgumentError, match="pass pooling, one of"):
            exported.embed(TEXTS)
        assert exported.embed(TEXTS, pooling="mean").shape == (4, 32)
