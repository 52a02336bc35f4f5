"""``torchax-serve embed``, with a checkpoint that the test writes, beside eager PyTorch."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_models import TEXTS, folder, tokenizer, write
from typer.testing import CliRunner

import torchax_serve
from torchax_serve.cli.main import app

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


@pytest.fixture(autouse=True)
def keep_this_process_as_it_is(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with a tiny BERT, and the mean of its hidden states of each of `TEXTS`."""
    path = tmp_path_factory.mktemp("bert")
    eager = folder(path, "BertModel")
    with torch.no_grad():
        hidden = [eager(**tokenizer()(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in TEXTS]
    return path, torch.stack(hidden).numpy()


def call(*arguments, **kwargs):
    return CliRunner().invoke(app, ["embed", *map(str, arguments)], **kwargs)


def test_texts_as_arguments_and_as_lines(bert):
    path, expected = bert
    done = call(path, *TEXTS, "--pooling", "mean")
    assert done.exit_code == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert call(path, "--pooling", "mean", input="\n".join(TEXTS)).stdout == done.stdout


def test_files_and_json(bert, tmp_path):
    path, expected = bert
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    done = call(path, *TEXTS, "--pooling", "mean", "--normalize", "-o", tmp_path / "found.npy")
    assert (done.exit_code, done.stdout) == (0, "")
    found = np.load(tmp_path / "found.npy")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, unit, atol=1e-4)
    printed = json.loads(call(path, TEXTS[0], "--pooling", "mean", "--json").stdout)
    assert (printed["dim"], printed["embeddings"][0]["text"]) == (32, TEXTS[0])
    call(path, TEXTS[0], "--pooling", "mean", "--output", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == printed


def test_pooling_rule_of_the_checkpoint_is_used(bert, tmp_path):
    folder(tmp_path, "BertModel")
    steps = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    modules = [{"idx": int(i), "path": p, "type": f"sentence_transformers.models.{kind}"} for i, p, kind in steps]
    write(tmp_path / "modules.json", modules)
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    unit = bert[1] / np.linalg.norm(bert[1], axis=1, keepdims=True)
    np.testing.assert_allclose(json.loads(call(tmp_path, TEXTS[1]).stdout), unit[1], atol=1e-4)
    plain = json.loads(call(tmp_path, TEXTS[1], "--no-normalize").stdout)
    np.testing.assert_allclose(plain, bert[1][1], atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a"], 'pass --pooling, one of "mean", "cls", "last"'),
        (["a", "--pooling", "median"], "--pooling: expected mean, cls, .* got 'median'"),
        (["a", "", "--pooling", "mean"], r"TEXT 2: expected some text, got an empty one"),
        ([" ", "--pooling", "mean"], r"TEXT 1: expected some text, got an empty one"),
        (["--pooling", "mean"], "TEXT: expected at least one text, got none"),
        (["a " * 80, "--pooling", "mean"], r"TEXT 1: expected at most 64 tokens, got 82; shorten it"),
        (["a", "-o", "found.csv"], "--output: expected a name that ends with .npy or .json, got found.csv"),
        (["a", "-o", "found.npy", "--json"], "--json: expected a file that ends with .json"),
        (["a", "-o", "nowhere/found.npy"], "--output: expected a folder that is there, got nowhere"),
    ],
)
def test_bad_input(bert, arguments, said):
    done = call(bert[0], *arguments)
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert re.search(said, done.stderr), done.stderr


def test_only_a_line_feed_ends_a_line(bert):
    path, _ = bert
    separators = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    text = f"JAX{separators}is fast.\r\nGemma\n"
    done = call(path, "--pooling", "mean", "--json", input=text.encode())
    assert done.exit_code == 0, done.stderr
    texts = [each["text"] for each in json.loads(done.stdout)["embeddings"]]
    assert texts == [f"JAX{separators}is fast.", "Gemma"]
    assert (
        call(path, "--pooling", "mean", input=b"\xef\xbb\xbfGemma").stdout
        == call(path, "Gemma", "--pooling", "mean").stdout
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"JAX\nGem\xffma\n", "got byte 0xff in line 2, behind 3 bytes"),
        (b"\xffJ\x00", "got byte 0xff in line 1, behind 0 bytes"),
        (b"Gemma\xe2\x82", "got byte 0xe2 in line 1, behind 5 bytes"),
        (b"\n\n", "TEXT 1: expected some text"),
    ],
)
def test_lines_that_cannot_be_read(bert, data, said):
    done = call(bert[0], "--pooling", "mean", input=data)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_run_names_embed_for_an_encoder(bert, monkeypatch):
    done = CliRunner().invoke(app, ["run", str(bert[0]), "Hi there"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is an encoder; for embeddings of texts: torchax-serve embed " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_generative_model_needs_a_rule():
    done = call(Path(torchax_serve.__file__).parent / "embedded", "JAX is fast.")
    assert done.exit_code == 2
    assert (
        'has no modules.json that says how its tokens become one embedding; pass --pooling, one of "mean"'
        in done.stderr
    )


@pytest.fixture
def described(bert, tmp_path):
    """A folder of sentence-transformers with a masked-language model's tensors; texts of 6 tokens at most."""
    folder(tmp_path, "BertForPreTraining")
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", config | {"architectures": ["BertForMaskedLM"]})
    entries = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in entries]
    write(tmp_path / "modules.json", modules)
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 6})
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "the "}})
    return tmp_path


def lines_of(caplog):
    return [each.getMessage() for each in caplog.records if each.name == "torchax_serve"]


def test_unused_tensors_and_cut_texts_are_reported_in_a_line_each(described, caplog):
    assert call(described, *TEXTS).exit_code == 0
    unused, cut = lines_of(caplog)
    assert unused.startswith(f"{described}: 4 tensors of the files unused by BertForMaskedLM (bert.pooler.dense.bias, ")
    assert cut.endswith("texts are cut to 6 tokens, as its files say; 2 of 3 are longer")


def test_verbose_lists_unused_tensors(described, caplog, monkeypatch):
    monkeypatch.setattr(logging.lastResort, "level", logging.WARNING)
    caplog.set_level(logging.WARNING, "torchax_serve")  # put back at the end
    caplog.handler.setLevel(logging.INFO)
    assert call(described, TEXTS[1], "--verbose").exit_code == 0
    assert "unused: cls.seq_relationship.weight" in lines_of(caplog)


def test_strict_refuses_unused_tensors(described):
    done = call(described, TEXTS[1], "--strict")
    assert done.exit_code == 2
    assert "4 without a place: bert.pooler.dense.bias" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_prompts_length_and_dimensions_from_flags(described):
    plain = json.loads(call(described, "the dog").stdout)
    assert json.loads(call(described, "dog", "--prompt-name", "query").stdout) == plain
    assert json.loads(call(described, "dog", "--prompt", "the ").stdout) == plain
    assert json.loads(call(described, "the dog", "--truncate-dim", "3").stdout) == plain[:3]
    done = call(described, TEXTS[0], "--no-truncate")
    assert (done.exit_code, "expected at most 6 tokens, got 8" in done.stderr) == (2, True)
