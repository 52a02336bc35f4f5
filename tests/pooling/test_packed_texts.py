"""Texts of many lengths in one row, beside eager PyTorch, one text at a time."""

import numpy as np
import pytest
import torch
import transformers
from encoder_models import folder
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import except_for
from weights import draw_matrices

from model_adapters.ops import registry
from torchax_serve import serve
from torchax_serve.pooling import packing
from torchax_serve.pooling.module_texts import ModuleTexts
from torchax_serve.pooling.text_program import TextProgram
from torchax_serve.pooling.text_tokenizer import IDS, MASK

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 130,
}
MODELS = {
    "AlbertModel": {"embedding_size": 16},
    "BertModel": {},
    "CamembertModel": {"pad_token_id": 1},
    "DistilBertModel": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "ElectraModel": {"embedding_size": 16},
    "ErnieModel": {},
    "EuroBertModel": {"num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "Gemma3TextModel": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "use_bidirectional_attention": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "LlamaModel": {"num_key_value_heads": 2},
    "ModernBertModel": {
        "pad_token_id": 0,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "reference_compile": False,
    },
    "NomicBertModel": {"head_dim": 8},
    "Qwen3Model": {"num_key_value_heads": 2, "head_dim": 8},
    "RobertaModel": {"pad_token_id": 1},
    "XLMRobertaModel": {"pad_token_id": 1},
    "XmodModel": {"pad_token_id": 1, "languages": ["en_XX"], "default_language": "en_XX"},
}
"""Models whose texts are packed, and what their configurations need besides `SIZES`."""
PADDED = {
    "MPNetModel": ({}, "attends past"),
    "DebertaV2Model": ({"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "attends past"),
    "MobileBertModel": (
        {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        "depends on the texts beside it",
    ),
    "BigBirdModel": ({"attention_type": "original_full"}, "attends past"),
    "T5EncoderModel": ({"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}, "takes no positions"),
}
"""Models whose texts are not, what their configurations need, and a part of the reason."""


def made(class_name, options, path):
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**SIZES | options)
    torch.manual_seed(0)
    model = model_class(config).eval()
    draw_matrices(model, std=0.2)
    model.save_pretrained(path)
    return model


def texts(lens, vocab_size=SIZES["vocab_size"]):
    rng = np.random.default_rng(1)
    return [rng.integers(3, vocab_size, length).tolist() for length in lens]


LENS = (1, 60, 2, 17, 33, 5, 100, 9)


@pytest.mark.parametrize("class_name", except_for(["Gemma3TextModel", "ModernBertModel", "RobertaModel"], MODELS))
def test_each_token_gets_what_it_gets_alone(class_name, tmp_path, caplog):
    eager = made(class_name, MODELS[class_name], tmp_path)
    asked = texts(LENS)
    with caplog.at_level("DEBUG", "torchax_serve"), serve(tmp_path) as served, registry.record_calls() as calls:
        found = served.embed_tokens(asked)
        means = served.embed(asked, pooling="mean")
    assert ("varlen_attention", "cpu-ffi") in calls, caplog.messages
    for ids, tokens, mean in zip(asked, found, means, strict=True):
        with torch.no_grad():
            hidden = eager(torch.tensor([ids])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(tokens, hidden, atol=1e-4)
        np.testing.assert_allclose(mean, hidden.mean(0), atol=1e-4)


@pytest.mark.parametrize("class_name", except_for(["MobileBertModel", "T5EncoderModel"], PADDED))
def test_others_are_padded(class_name, tmp_path, caplog):
    options, reason = PADDED[class_name]
    eager = made(class_name, options, tmp_path)
    asked = texts((5, 12, 9))
    with caplog.at_level("DEBUG", "torchax_serve"), serve(tmp_path) as served:
        found = served.embed_tokens(asked)
    assert any("are padded" in each.message and reason in each.message for each in caplog.records)
    for ids, tokens in zip(asked, found, strict=True):
        with torch.no_grad():
            hidden = eager(torch.tensor([ids])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(tokens, hidden, atol=1e-4)


def test_padding_tokens_within_a_text_are_counted_as_the_model_does(tmp_path):
    eager = made("RobertaModel", MODELS["RobertaModel"], tmp_path)
    asked = [[5, 1, 1, 7, 9], [1, 8, 9], [4, 1]]  # 1 is the padding token
    with serve(tmp_path) as served:
        found = served.embed_tokens(asked)
    for ids, tokens in zip(asked, found, strict=True):
        with torch.no_grad():  # as this library's users mean ids: all are seen
            hidden = eager(torch.tensor([ids]), torch.ones(1, len(ids))).last_hidden_state[0].numpy()
        np.testing.assert_allclose(tokens, hidden, atol=1e-4)


def test_a_text_is_bit_equal_beside_others(tmp_path):
    made("BertModel", {}, tmp_path)
    asked = texts(LENS)
    with serve(tmp_path) as served:
        together = served.embed(asked, pooling="cls")
        for index, ids in enumerate(asked):
            np.testing.assert_allclose(served.embed([ids], pooling="cls")[0], together[index], atol=1e-6)


def test_nan_of_one_text_reaches_no_other(tmp_path):
    eager = folder(tmp_path, "BertModel")
    with torch.no_grad():
        eager.embeddings.word_embeddings.weight[20] = float("nan")
    eager.save_pretrained(tmp_path)
    for pooling in ("mean", "max", "last", "weighted_mean"):
        with serve(tmp_path) as served:
            found = served.embed([[5, 6, 7], [8, 20, 9], [10, 11]], pooling=pooling)
        assert np.isnan(found).any(1).tolist() == [False, True, False]


def test_sizes_of_rows_are_few(tmp_path):
    made("BertModel", {}, tmp_path)
    with serve(tmp_path) as served:
        assert served.warm_up_texts() is None
        before = served._runtimes[0].steps.num_traces.total()
        for lens in ((1,), LENS, (128,) * 9, tuple(range(1, 100))):
            served.embed(texts(lens), pooling="mean")
        assert served._runtimes[0].steps.num_traces.total() == before
        assert before <= len(packing.packed_sizes(128)) + 2  # the trial's


def test_a_second_start_makes_no_trial(tmp_path, monkeypatch):
    made("BertModel", {}, tmp_path)
    asked = texts((4, 20))
    with serve(tmp_path) as served:
        first = served.embed(asked, pooling="mean")
        served._runtimes[0].steps.executables.wait_for_writes()
    monkeypatch.setattr(ModuleTexts, "_unpackable", lambda *given: pytest.fail("a trial"))
    with serve(tmp_path) as served:
        np.testing.assert_array_equal(served.embed(asked, pooling="mean"), first)


class RecordedRows(TextProgram):
    """Remembers the rows that it gets."""

    class_name, can_pad, vocab_size, max_positions, num_programs = "Recorded", True, 1000, None, 0

    def __init__(self):
        self.rows = []

    def accepts(self, name):
        return name in (IDS, MASK, "token_type_ids")

    def forward(self, arrays):
        raise AssertionError("padded")

    def compile(self, arrays):
        raise AssertionError("not compiled")

    def forward_packed(self, arrays, cu_seqlens):
        self.rows.append((arrays, cu_seqlens))
        return {}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 400) | st.integers(1, 12) | st.just(5000), min_size=1, max_size=90))
def test_every_text_stands_in_one_row(lens):
    program = RecordedRows()
    rows = [{IDS: [index % 1000] * length, "token_type_ids": [index % 7] * length} for index, length in enumerate(lens)]
    seen = []
    for batch in packing.run_packed(program, rows, {"token_type_ids"}):
        arrays, cu = program.rows[-1]
        size = len(arrays[IDS])
        assert size in packing.packed_sizes(max(lens)) and len(cu) == packing.num_texts(size) + 1
        assert size == packing.row_size(int(cu[-1])) and (cu[-1] <= packing.TOKENS_PER_ROW or len(batch.indices) == 1)
        assert set(arrays) == {IDS, "token_type_ids"}
        for number, index in enumerate(batch.indices):
            own = slice(cu[number], cu[number + 1])
            assert arrays[IDS][own].tolist() == rows[index][IDS] and batch.begins[number] == cu[number]
            assert arrays["token_type_ids"][own].tolist() == rows[index]["token_type_ids"]
            assert np.asarray(batch.tokens.rows)[own].tolist() == [number] * lens[index]
            assert np.asarray(batch.tokens.places)[own].tolist() == list(range(lens[index]))
        assert (np.asarray(batch.tokens.rows)[cu[-1] :] == batch.tokens.num_rows).all()
        seen += batch.indices
    assert sorted(seen) == list(range(len(lens)))
    # No row is left that could have taken a text of the next one, as long as there is room for more texts.
    used = [(int(cu[-1]), len(arrays[IDS])) for arrays, cu in program.rows]
    assert all(4 * tokens > 3 * size or size - tokens < packing.SMALLEST_ROW for tokens, size in used)
