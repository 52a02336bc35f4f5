"""Sparse embeddings beside SPLADE's formula on eager logits, one text at a time.

The formula was compared with `SparseEncoder` of sentence-transformers 6.2, to 1e-6.
"""

import numpy as np
import pytest
import torch
from encoder_models import TEXTS, folder, tokenizer, write

from torchax_serve import CheckpointError, InvalidArgumentError, UnsupportedModelError, serve

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")

BASE = "sentence_transformers."
POOLING = BASE + "sparse_encoder.modules.splade_pooling.SpladePooling"
TASK = {
    "transformer_task": "fill-mask",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "token_embeddings",
}


def write_files(path, config, *, kind=POOLING, transformer=BASE + "base.modules.transformer.Transformer", **settings):
    """Writes the files of a release 6 of sentence-transformers."""
    entries = [("", transformer), ("1_SpladePooling", kind)]
    modules = [{"idx": i, "name": str(i), "path": where, "type": name} for i, (where, name) in enumerate(entries)]
    write(path / "modules.json", modules)
    write(path / "sentence_bert_config.json", TASK)
    write(path / "1_SpladePooling" / "config.json", config)
    write(path / "config_sentence_transformers.json", {"model_type": "SparseEncoder", **settings})


@pytest.fixture(scope="module")
def splade(tmp_path_factory):
    """A served SPLADE model with prompts, and the eager model of masked tokens."""
    path = tmp_path_factory.mktemp("splade")
    eager = folder(path, "BertForMaskedLM")
    write_files(path, {"pooling_strategy": "max", "activation_function": "relu"}, prompts={"query": "a big "})
    with serve(path) as served:
        yield served, eager


def expected_row(eager, text, strategy="max", activation="relu"):
    with torch.no_grad():
        logits = eager(**tokenizer()(text, return_tensors="pt")).logits[0]
    weights = torch.log1p(torch.relu(logits))
    weights = torch.log1p(weights) if activation == "log1p_relu" else weights
    return (weights.amax(0) if strategy == "max" else weights.sum(0)).numpy()


def check_row(found, expected):
    (indices,) = np.nonzero(expected)
    assert found.indices.tolist() == indices.tolist() and 0 < len(indices) < len(expected)
    np.testing.assert_allclose(found.values, expected[indices], atol=1e-5)


def test_indices_and_values_are_those_of_the_formula(splade):
    served, eager = splade
    for found, text in zip(served.embed_sparse(TEXTS), TEXTS, strict=True):
        check_row(found, expected_row(eager, text))
    check_row(served.embed_sparse("red rain", prompt_name="query"), expected_row(eager, "a big red rain"))
    first, second = served.embed_sparse(TEXTS[:2])
    both = [expected_row(eager, text) for text in TEXTS[:2]]
    assert first.dot(second) == pytest.approx(float(both[0] @ both[1]), abs=1e-4)


def test_dense_rows_have_the_size_of_the_vocabulary_as_in_vllm(splade):
    served, eager = splade
    expected = np.stack([expected_row(eager, text) for text in TEXTS])
    np.testing.assert_allclose(served.embed(TEXTS), expected, atol=1e-5)


def test_the_largest_values_are_kept(splade):
    served, eager = splade
    found, row = served.embed_sparse(TEXTS[0], max_active_dims=3), expected_row(eager, TEXTS[0])
    assert found.indices.tolist() == sorted(np.argsort(-row)[:3].tolist())
    np.testing.assert_allclose(found.values, row[found.indices], atol=1e-5)
    for wrong in (0, True, 1.5):
        with pytest.raises(InvalidArgumentError, match="max_active_dims: expected a positive number"):
            served.embed_sparse(TEXTS[0], max_active_dims=wrong)
    with pytest.raises(InvalidArgumentError, match="truncate_dim: expected none for sparse embeddings"):
        served.embed(TEXTS[0], truncate_dim=4)


def test_other_settings_of_the_files(splade, tmp_path):
    _, eager = splade
    folder(tmp_path, "BertForMaskedLM")
    write_files(
        tmp_path,
        {"pooling_strategy": "sum", "activation_function": "log1p_relu", "word_embedding_dimension": 25},
        kind=BASE + "sparse_encoder.models.SpladePooling",
        transformer=BASE + "sparse_encoder.models.MLMTransformer",
        max_active_dims=4,
    )
    (tmp_path / "sentence_bert_config.json").unlink()
    with serve(tmp_path) as served:
        found, row = served.embed_sparse(TEXTS[2]), expected_row(eager, TEXTS[2], "sum", "log1p_relu")
        assert found.indices.tolist() == sorted(np.argsort(-row)[:4].tolist())
        np.testing.assert_allclose(found.values, row[found.indices], atol=1e-5)


def test_what_is_no_sparse_model_is_refused(splade, tmp_path):
    served, _ = splade
    with pytest.raises(UnsupportedModelError, match="export: expected a model with one dense embedding"):
        served.export(tmp_path / "bundle")
    folder(tmp_path, "BertModel")
    modules = [{"path": "", "type": BASE + "models.Transformer"}, {"path": "1", "type": BASE + "models.Pooling"}]
    write(tmp_path / "modules.json", modules)
    write(tmp_path / "1" / "config.json", {"pooling_mode": "mean"})
    with (
        serve(tmp_path) as dense,
        pytest.raises(UnsupportedModelError, match="embed_sparse: expected a model with Spl"),
    ):
        dense.embed_sparse("a cat")
    write_files(tmp_path, {"pooling_strategy": "mean"})
    with serve(tmp_path) as wrong, pytest.raises(CheckpointError, match="expected pooling_strategy max or sum"):
        wrong.embed_sparse("a cat")
    write_files(tmp_path, {})
    with serve(tmp_path) as headless, pytest.raises(UnsupportedModelError, match="expected logits of tokens"):
        headless.embed_sparse("a cat")
