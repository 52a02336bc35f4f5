"""Files as the hub has them: for another head, of old releases, of the base model alone; beside `from_pretrained`."""

import jax
import numpy as np
import pytest
import torch
import transformers as tf
from loading_models import COMMON, edit_json
from safetensors.torch import load_file, save_file
from thorough import except_for

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import CheckpointError
from model_adapters.loading import load_model
from torchax_serve import UnsupportedModelError, serve

_BERT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
_T5 = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
_DISTILBERT = {
    "vocab_size": 40,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 40,
}
_BART = {
    "vocab_size": 40,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
}
_XLNET = {"vocab_size": 40, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}


def _renamed(*pairs):
    def change(tensors):
        for name in list(tensors):
            new = name
            for old, now in pairs:
                new = new.replace(old, now)
            tensors[new] = tensors.pop(name)

    return change


def _added(**shapes):
    def change(tensors):
        tensors.update({name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()})

    return change


# name: (configuration, class that was saved, `architectures` of config.json, change of the file's tensors)
LAYOUTS = {
    "bert-base-uncased": (tf.BertConfig(**_BERT), tf.BertForPreTraining, "BertForMaskedLM", None),
    "bert of TensorFlow times": (
        tf.BertConfig(**_BERT),
        tf.BertForPreTraining,
        "BertForMaskedLM",
        _renamed(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
    ),
    "bert with position_ids": (
        tf.BertConfig(**_BERT),
        tf.BertModel,
        "BertModel",
        _added(embeddings__position_ids=(1, 40)),
    ),
    "colbertv2.0": (tf.BertConfig(**_BERT), tf.BertModel, "HF_ColBERT", _added(linear__weight=(8, 24))),
    "bert without architectures": (tf.BertConfig(**_BERT), tf.BertForMaskedLM, None, None),
    "roberta-base": (tf.RobertaConfig(**_BERT), tf.RobertaForMaskedLM, "RobertaModel", None),
    "xlm-roberta": (tf.XLMRobertaConfig(**_BERT), tf.XLMRobertaModel, "XLMRobertaForMaskedLM", None),
    "camembert": (tf.CamembertConfig(**_BERT), tf.CamembertForMaskedLM, "CamembertForSequenceClassification", None),
    "all-mpnet-base-v2": (tf.MPNetConfig(**_BERT), tf.MPNetModel, "MPNetForMaskedLM", None),
    "electra discriminator": (tf.ElectraConfig(**_BERT), tf.ElectraForPreTraining, "ElectraForMaskedLM", None),
    "albert": (tf.AlbertConfig(**_BERT), tf.AlbertForPreTraining, "AlbertModel", None),
    "deberta-v3-base": (tf.DebertaV2Config(**_BERT), tf.DebertaV2ForMaskedLM, None, None),
    "deberta for answers": (tf.DebertaV2Config(**_BERT), tf.DebertaV2Model, "DebertaV2ForQuestionAnswering", None),
    "distilbert": (tf.DistilBertConfig(**_DISTILBERT), tf.DistilBertForMaskedLM, "DistilBertModel", None),
    "distilbert, a head that is not there": (
        tf.DistilBertConfig(**_DISTILBERT),
        tf.DistilBertForMaskedLM,
        "DistilBertForSequenceClassification",
        None,
    ),
    "xlnet": (tf.XLNetConfig(**_XLNET), tf.XLNetLMHeadModel, "XLNetModel", None),
    "gpt2": (
        tf.GPT2Config(**_GPT2),
        tf.GPT2Model,
        "GPT2LMHeadModel",
        _added(h__0__attn__bias=(1, 1, 40, 40), h__0__attn__masked_bias=()),
    ),
    "gpt2 as a base": (tf.GPT2Config(**_GPT2), tf.GPT2LMHeadModel, "GPT2Model", None),
    "llama of old releases": (
        tf.LlamaConfig(**COMMON),
        tf.LlamaForCausalLM,
        "LlamaForCausalLM",
        _added(model__layers__0__self_attn__rotary_emb__inv_freq=(4,)),
    ),
    "a reward model's file as a language model": (
        tf.LlamaConfig(**COMMON, tie_word_embeddings=True),
        tf.LlamaForSequenceClassification,
        "LlamaForCausalLM",
        None,
    ),
    "qwen3 embedding": (tf.Qwen3Config(**COMMON, tie_word_embeddings=True), tf.Qwen3Model, "Qwen3ForCausalLM", None),
    "qwen3 embedding, 8b": (tf.Qwen3Config(**COMMON), tf.Qwen3Model, "Qwen3ForCausalLM", None),
    "t5 of the first release": (
        tf.T5Config(**_T5),
        tf.T5ForConditionalGeneration,
        "T5ForConditionalGeneration",
        _added(decoder__block__0__layer__1__EncDecAttention__relative_attention_bias__weight=(32, 4)),
    ),
    "t5 v1.1, whose base alone was saved": (
        tf.T5Config(**_T5, tie_word_embeddings=False),
        tf.T5Model,
        "T5ForConditionalGeneration",
        None,
    ),
    "sentence-t5": (tf.T5Config(**_T5), tf.T5EncoderModel, "T5ForConditionalGeneration", None),
    "t5's encoder of a whole": (tf.T5Config(**_T5), tf.T5ForConditionalGeneration, "T5EncoderModel", None),
    "bart-base": (tf.BartConfig(**_BART), tf.BartModel, "BartForConditionalGeneration", None),
}

# What the folder leads to where a head is not in it; else the class of `architectures`.
PARTS = {
    "colbertv2.0": "BertModel",
    "xlm-roberta": "XLMRobertaModel",
    "camembert": "CamembertModel",
    "all-mpnet-base-v2": "MPNetModel",
    "electra discriminator": "ElectraModel",
    "deberta for answers": "DebertaV2Model",
    "distilbert, a head that is not there": "DistilBertModel",
    "qwen3 embedding, 8b": "Qwen3Model",
    "sentence-t5": "T5EncoderModel",
    "bert without architectures": "BertLMHeadModel",  # as AutoModelForCausalLM has it
    "deberta-v3-base": "DebertaV2Model",
}

# What differs in more than the type of the model: renamed or added tensors, and heads that a file or a class lacks.
DIFFERENT = (
    "bert of TensorFlow times",
    "bert with position_ids",
    "bert without architectures",
    "colbertv2.0",
    "distilbert, a head that is not there",
    "gpt2",
    "llama of old releases",
    "qwen3 embedding, 8b",
    "t5 of the first release",
    "sentence-t5",
)


def written(folder, layout):
    """The folder; returns the model that was saved."""
    config, saved_class, architecture, change = LAYOUTS[layout]
    torch.manual_seed(0)
    saved = saved_class(config).eval()
    saved.save_pretrained(folder)
    edit_json(folder / "config.json", architectures=None if architecture is None else [architecture])
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return saved


def hidden_states(model, ids):
    with torch.no_grad():
        encoder = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
        return encoder(input_ids=ids).last_hidden_state.numpy()


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.parametrize("layout", except_for(DIFFERENT, LAYOUTS))
def test_weights_are_those_of_from_pretrained_and_embed_needs_no_head(layout, tmp_path):
    saved = written(tmp_path, layout)
    name = PARTS.get(layout) or LAYOUTS[layout][2]
    reference, info = getattr(tf, name).from_pretrained(tmp_path, output_loading_info=True)
    with serve(tmp_path) as served:
        loaded = served._loaded_or_raise()
        assert type(loaded.module).__name__ == name
        report = served.load_report
        expected = named_tensors(reference)
        assert loaded.weights.keys() <= expected.keys()
        assert set(expected) - set(loaded.weights) <= {each for each in expected if each.startswith("pooler.")}
        drawn = set(info["missing_keys"])  # from_pretrained fills these with random numbers
        for key, array in loaded.weights.items():
            assert key not in drawn
            np.testing.assert_array_equal(np.asarray(array), expected[key].detach().numpy(), err_msg=key)
        if name == LAYOUTS[layout][2]:
            assert set(report.unused_tensors) == set(info["unexpected_keys"])
            assert set(report.missing_tensors) == drawn
        ids = torch.tensor([[5, 6, 7, 8]])
        found = served.embed([ids[0].tolist()], pooling="mean")[0]
    np.testing.assert_allclose(found, hidden_states(saved, ids)[0].mean(0), atol=1e-5)


def test_what_needs_the_head_names_what_the_files_lack(tmp_path, caplog):
    written(tmp_path, "camembert")
    edit_json(tmp_path / "config.json", architectures=["CamembertForSequenceClassification"])
    with serve(tmp_path) as served:
        with pytest.raises(UnsupportedModelError, match=r"got CamembertModel; its files lack classifier\.dense\.bias"):
            served.classify([[5, 6]])
        assert len(served.load_report.missing_tensors) == 4
    (record,) = [each for each in caplog.records if each.name == "torchax_serve" and each.levelname == "WARNING"]
    assert "CamembertModel alone is loaded; " in record.getMessage()
    with pytest.raises(CheckpointError, match=r"4 missing: classifier\.dense\.bias, .*Leave strict out"):
        serve(tmp_path, strict=True)


def test_a_language_model_without_its_head_embeds_and_does_not_generate(tmp_path):
    written(tmp_path, "qwen3 embedding, 8b")
    with (
        serve(tmp_path) as served,
        pytest.raises(UnsupportedModelError, match=r"Qwen3Model does not generate .*its files lack lm_head\.weight"),
    ):
        served.generate(torch.tensor([[5]]))


def test_on_a_mesh_the_part_is_laid_out_as_itself(tmp_path):
    written(tmp_path, "qwen3 embedding, 8b")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "model", "expert"))
    loaded = load_model(tmp_path, mesh=mesh)
    assert type(loaded.module).__name__ == "Qwen3Model"
    assert loaded.weights.keys() <= loaded.sharding.placed.keys()


def test_layers_that_are_missing_are_an_error_with_or_without_a_head(tmp_path):
    written(tmp_path, "all-mpnet-base-v2")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for strict in (False, True):
        with pytest.raises(CheckpointError, match=r"7 missing: lm_head\.bias, .* and 1 more"):
            load_model(tmp_path, strict=strict)


def test_the_names_are_in_the_log_for_who_asks(tmp_path, caplog):
    written(tmp_path, "bert-base-uncased")
    with caplog.at_level("INFO", "torchax_serve"):
        load_model(tmp_path)
    lines = [each.getMessage() for each in caplog.records if each.name == "torchax_serve"]
    assert "unused: bert.pooler.dense.weight" in lines
    assert len(lines) == 5
