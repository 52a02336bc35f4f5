"""Checkpoints whose generation configuration asks for beams: the text comes at the end, or greedily if asked so."""

import copy

import pytest
import torch
from thorough import thorough
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from weights import draw_matrices

from torchax_serve import EngineOptions, InvalidArgumentError, SamplingParams, UnsupportedArgumentError, serve

ENGINE = EngineOptions(max_model_len=24, max_num_seqs=2, page_size=4, max_num_batched_tokens=24)
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BEAMS = {
    "num_beams": 3,
    "early_stopping": True,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "min_length": 4,
    "max_length": 14,
}
PROMPT = [9, 33, 12, 40, 7]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def bart():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 32}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    model = BartForConditionalGeneration(BartConfig(vocab_size=61, decoder_start_token_id=2, **SPECIAL, **sizes))
    model.generation_config.update(**BEAMS, forced_bos_token_id=5, forced_eos_token_id=2)
    return model


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=32, **SPECIAL, **sizes))
    model.generation_config.update(**BEAMS | {"max_length": 18})
    return model


@pytest.fixture(scope="module", params=[thorough(bart), llama])
def checkpoint(request, tmp_path_factory):
    """An eager model, and its folder with a tokenizer."""
    model = request.param().eval()
    draw_matrices(model, std=0.3)
    folder = tmp_path_factory.mktemp("beams")
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(60)} | {"?": 60}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return model, folder


def eager_tokens(model, **options):
    ids = torch.tensor([PROMPT])
    tokens = copy.deepcopy(model).generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
    return tokens[1:] if model.config.is_encoder_decoder else tokens[len(PROMPT) :]


def test_every_interface_matches_eager_beam_search(checkpoint):
    model, folder = checkpoint
    wanted, greedy = eager_tokens(model), eager_tokens(model, num_beams=1)
    assert wanted != greedy
    with serve(folder, dtype="float32", engine=ENGINE) as served:
        ids = torch.tensor([PROMPT])
        tokens = served.generate(ids, attention_mask=torch.ones_like(ids))[0].tolist()
        assert tokens[-len(wanted) :] == wanted
        answer = served.stream(PROMPT)
        assert ("".join(answer), answer.token_ids) == (served.tokenizer.decode(wanted), wanted)
        assert answer.stats.finish_reason == ("stop" if wanted[-1] == 2 else "length")
        assert [each.token_ids for each in served.generate_batch([PROMPT, PROMPT])] == [wanted, wanted]
        assert served.chat(" ".join(f"w{i}" for i in PROMPT)) == served.tokenizer.decode(wanted)
        assert "engine" not in repr(served)  # that runs batches: no request has gone to one
        for params in (SamplingParams(num_beams=1), SamplingParams(temperature=0)):
            assert served.generate_batch([PROMPT], params)[0].token_ids == greedy
        assert served.stats() is not None
        drawn = [
            served.generate_batch([PROMPT], SamplingParams(temperature=2.0, seed=4))[0].token_ids for _ in range(2)
        ]
        assert drawn[0] == drawn[1]
        with pytest.raises(
            UnsupportedArgumentError, match=r"logprobs: expected a request.*num_beams is set.*num_beams=1"
        ):
            served.generate_batch([PROMPT], SamplingParams(logprobs=2))


def test_request_may_set_more_beams(checkpoint):
    model, folder = checkpoint
    with serve(folder, dtype="float32", engine=ENGINE) as served:
        params = SamplingParams(num_beams=4, max_new_tokens=6)
        wanted = eager_tokens(model, num_beams=4, max_new_tokens=6)
        assert served.generate_batch([PROMPT], params)[0].token_ids == wanted
    with pytest.raises(InvalidArgumentError, match="num_beams: expected a whole number >= 1, got 0"):
        SamplingParams(num_beams=0)
