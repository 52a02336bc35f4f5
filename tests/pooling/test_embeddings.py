"""Embeddings beside eager PyTorch, one text at a time, pooled by numpy; rules in the checkpoint's own files."""

import numpy as np
import pytest
import torch
from encoder_models import TEXTS, folder, model, tokenizer, write
from safetensors.torch import save_file

from torchax_serve import CheckpointError, InvalidArgumentError, UnsupportedModelError, serve
from torchax_serve.entrypoints.encoder_model import EncoderModel
from torchax_serve.pooling import POOLINGS
from torchax_serve.pooling.batching import _num_rows

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


def hidden_of(eager, text):
    with torch.no_grad():
        return eager(**tokenizer()(text, return_tensors="pt")).last_hidden_state[0].numpy()


POOLED = {
    "mean": lambda x: x.mean(0),
    "cls": lambda x: x[0],
    "last": lambda x: x[-1],
    "max": lambda x: x.max(0),
    "mean_sqrt_len": lambda x: x.sum(0) / np.sqrt(len(x)),
    "weighted_mean": lambda x: np.average(x, 0, np.arange(1, len(x) + 1)),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    eager = folder(path, "BertModel")
    with serve(path) as served:
        yield eager, served


@pytest.mark.parametrize("pooling", POOLINGS)
def test_poolings(bert, pooling):
    eager, served = bert
    assert isinstance(served, EncoderModel)
    found = served.embed(TEXTS, pooling=pooling)
    expected = np.stack([POOLED[pooling](hidden_of(eager, text)) for text in TEXTS])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(served.embed(TEXTS[1], pooling=pooling), found[1], atol=1e-5)


def test_token_ids_and_texts_give_equal_embeddings(bert):
    _, served = bert
    ids = [tokenizer()(text)["input_ids"] for text in TEXTS]
    np.testing.assert_array_equal(served.embed(ids, pooling="mean"), served.embed(TEXTS, pooling="mean"))


def test_many_texts_compile_few_programs(bert):
    _, served = bert
    steps = served._runtimes[0].steps
    before = sum(steps.num_traces.values())
    for length in range(17, 33):
        served.embed([[5] * length], pooling="mean")
    for num_texts in (3, 4):
        served.embed([[5] * 20] * num_texts, pooling="mean")
    assert sum(steps.num_traces.values()) - before <= 4  # rows of 32, 64 and 80 tokens, and the two texts of a trial


@pytest.mark.parametrize("num_texts", [1, 2, 3, 5, 6, 7, 9, 11, 33])
def test_rows_are_padded_by_a_quarter_at_most(num_texts):
    rows = _num_rows(num_texts)
    assert rows.bit_count() == 1 and 4 * min(num_texts, rows) >= 3 * rows


def test_rule_of_the_checkpoint(tmp_path):
    eager = folder(tmp_path, "BertModel")
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    paths = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write(tmp_path / "modules.json", modules)
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    write(tmp_path / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **flags})
    activation = "torch.nn.modules.activation.Tanh"
    dense = {"in_features": 64, "out_features": 8, "bias": True, "activation_function": activation}
    write(tmp_path / "2_Dense" / "config.json", dense)
    weight, bias = torch.randn(8, 64), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "the cat "}})
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": True})

    def expected(text):
        hidden = hidden_of(eager, text)
        joined = np.concatenate([hidden[0], hidden.mean(0)])
        out = np.tanh(weight.numpy() @ joined + bias.numpy())
        return out / np.linalg.norm(out)

    with serve(tmp_path) as served:
        np.testing.assert_allclose(served.embed(TEXTS), np.stack([expected(text) for text in TEXTS]), atol=1e-4)
        np.testing.assert_allclose(served.embed("A DOG"), expected("a dog"), atol=1e-4)
        np.testing.assert_allclose(served.embed("sat", prompt_name="query"), expected("the cat sat"), atol=1e-4)
        with pytest.raises(InvalidArgumentError, match="expected at most 20 tokens, got 32; shorten it, or pass trunc"):
            served.embed("cat " * 30, truncate=False)
        cut = served.embed("cat " * 30, truncate=True)
        np.testing.assert_allclose(cut, served.embed("cat " * 18), atol=1e-5)
        with pytest.raises(
            InvalidArgumentError, match="prompt_name: expected one of 'query', 'document', got 'nobody'"
        ):
            served.embed("cat", prompt_name="nobody")
    write(tmp_path / "modules.json", [*modules, {"type": "sentence_transformers.models.LSTM", "path": "4_LSTM"}])
    with (
        serve(tmp_path) as served,
        pytest.raises(UnsupportedModelError, match=r"type sentence_transformers.models.LSTM"),
    ):
        served.embed("cat")
    (tmp_path / "modules.json").write_text("[")
    with serve(tmp_path) as served, pytest.raises(CheckpointError, match="not readable as JSON"):
        served.embed("cat")


def test_generative_model_needs_a_rule():
    with serve() as served:
        with pytest.raises(
            InvalidArgumentError, match=r'no modules\.json .* pass pooling, one of "mean", "cls", "last"'
        ):
            served.embed("Hello")
        ids = served.tokenizer("Hello there")["input_ids"]
        found = served.embed(["Hello there"], pooling="last")[0]
        hidden = served.torch_model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    np.testing.assert_allclose(found, hidden.float().numpy(), atol=1e-2)


def test_bad_input(bert):
    _, served = bert
    with pytest.raises(InvalidArgumentError, match=r"pooling: expected one of .*, got 'median'"):
        served.embed("cat", pooling="median")
    with pytest.raises(InvalidArgumentError, match="texts: expected at least one text, got none"):
        served.embed([], pooling="mean")
    with pytest.raises(InvalidArgumentError, match=r"texts\[1\]: expected at least one token"):
        served.embed([[5], []], pooling="mean")
    with pytest.raises(InvalidArgumentError, match=r"texts: expected a text or several, got 3"):
        served.embed(3, pooling="mean")
    with pytest.raises(InvalidArgumentError, match=r"texts\[1\]: expected Unicode text, got '\\ud83d', half of a char"):
        served.embed(["cat", "a \ud83d dog"], pooling="mean")
    for wrong in (-(2**40), 2**31, 2**63):
        with pytest.raises(InvalidArgumentError, match=f"expected token ids from 0 to 24, got {wrong}; "):
            served.embed([[5, wrong]], pooling="mean")
    with pytest.raises(InvalidArgumentError, match="expected token ids from 0 to"):
        served.embed([[10_000]], pooling="mean")
    with pytest.raises(UnsupportedModelError, match="classify: expected a model that classifies texts"):
        served.classify("cat")
    with pytest.raises(UnsupportedModelError, match="BertModel does not generate text"):
        served.generate(torch.tensor([[5]]))
    with pytest.raises(UnsupportedModelError, match=r"does not generate text.* embed\(\) gives embeddings"):
        served.chat("cat")
    with serve(model("BertModel")) as bare, pytest.raises(InvalidArgumentError, match="has no tokenizer"):
        bare.embed("cat", pooling="mean")
