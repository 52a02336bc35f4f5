"""Base models that generate over their own weights, as their users' Auto classes have them generate."""

import json

import pytest
import torch
import transformers
from thorough import except_for
from weights import draw_matrices

from torchax_serve import SamplingParams, UnsupportedModelError, serve

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "vocab_size": 61}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
CONFIGS = {
    "bart": {**BART, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_bos_token_id": 5},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64},
}
IDS = torch.tensor([[9, 33, 12, 40, 7]])

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def base_folder(folder, model_type, **changes):
    """A folder of a base model whose configuration asks for two beams, as older ones do."""
    config = transformers.AutoConfig.for_model(model_type, **{**SPECIAL, **CONFIGS[model_type], **changes})
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    draw_matrices(model, std=0.4)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_beams": 2, "max_length": 12}))
    return folder


def auto_class(model_type):
    return transformers.AutoModelForCausalLM if model_type == "gpt2" else transformers.AutoModelForSeq2SeqLM


@pytest.mark.parametrize("model_type", except_for(["t5"], CONFIGS))
def test_a_base_model_generates_as_its_users_have_it(model_type, tmp_path):
    folder = base_folder(tmp_path, model_type)
    eager = auto_class(model_type).from_pretrained(folder).eval()
    wanted, greedy = (
        eager.generate(IDS, attention_mask=torch.ones_like(IDS), **each) for each in ({}, {"num_beams": 1})
    )
    base = transformers.AutoModel.from_pretrained(folder).eval()
    given = {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :2]} if model_type != "gpt2" else {})
    with serve(folder, dtype="float32") as served:
        assert type(served.torch_model).__name__ == type(base).__name__
        assert torch.allclose(served(**given).last_hidden_state, base(**given).last_hidden_state, atol=1e-4)
        assert torch.equal(served.generate(IDS, attention_mask=torch.ones_like(IDS)), wanted)
        new = greedy[0, 1 if model_type != "gpt2" else IDS.shape[1] :].tolist()
        config = SamplingParams(num_beams=1).to_generation_config(served.generation_config)
        assert list(served.iter_tokens(IDS[0].tolist(), config)) == new


def test_a_head_that_the_files_do_not_hold_is_named(tmp_path):
    folder = base_folder(tmp_path, "gpt2", tie_word_embeddings=False)
    with (
        serve(folder, dtype="float32") as served,
        pytest.raises(UnsupportedModelError, match=r"as GPT2LMHeadModel would; its files lack lm_head\.weight"),
    ):
        served.generate(IDS)
