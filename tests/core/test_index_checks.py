"""Ids, positions and token types beyond the end of a table, or before its start: an error, as in PyTorch."""

import copy

import pytest
import torch
from cache_name import CACHE
from thorough import except_for
from transformers import (
    BertConfig,
    BertModel,
    CodeGenConfig,
    CodeGenForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from torchax_serve import EngineOptions, InvalidArgumentError, SamplingParams, serve, to_jax

IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def models():
    """Eager models by name, and the same on JAX."""
    torch.manual_seed(0)
    eager = {
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=16)),
        "opt": OPTForCausalLM(
            OPTConfig(
                vocab_size=40,
                hidden_size=32,
                word_embed_proj_dim=32,
                ffn_dim=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                max_position_embeddings=16,
            )
        ),
        "bert": BertModel(
            BertConfig(
                vocab_size=40,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=4,
                max_position_embeddings=32,
                type_vocab_size=2,
            )
        ),
    }
    return {name: (model.eval(), to_jax(copy.deepcopy(model))) for name, model in eager.items()}


COMPUTED = {
    "gptj": lambda: GPTJForCausalLM(
        GPTJConfig(vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=16, rotary_dim=4)
    ),
    "codegen": lambda: CodeGenForCausalLM(
        CodeGenConfig(vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=16, n_ctx=16, rotary_dim=4)
    ),
    "ctrl": lambda: CTRLLMHeadModel(CTRLConfig(vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=16, dff=32)),
}
"""Models that look positions up by ``gather`` or ``table[positions]``."""


@pytest.mark.filterwarnings("ignore:.*token_id must be")
@pytest.mark.parametrize("name", except_for(["gptj"], COMPUTED))
def test_tables_of_computed_positions_end(name):
    torch.manual_seed(0)
    eager = COMPUTED[name]().eval()
    on_jax = to_jax(copy.deepcopy(eager))
    with torch.no_grad():
        expected = eager(IDS[:, :16])[0]
    torch.testing.assert_close(on_jax(IDS[:, :16])[0], expected, atol=1e-4, rtol=1e-4)
    with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
        eager(IDS[:, :17])
    with pytest.raises(InvalidArgumentError, match="the rows of this"):
        on_jax(IDS[:, :17])
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert on_jax.generate(IDS[:, :12], max_new_tokens=4, **options).shape == (1, 16)
    with pytest.raises(InvalidArgumentError, match="expected at most 16 tokens in all"):
        on_jax.generate(IDS[:, :12], max_new_tokens=6, **options)
    with serve(eager, engine=EngineOptions(max_num_seqs=2)) as served:
        answer = served.generate_batch([IDS[0, :12].tolist()], SamplingParams(max_new_tokens=9, ignore_eos=True))
    assert len(answer[0].token_ids) <= 5


CALLS = {
    "more tokens than positions": ("gpt2", {"input_ids": IDS}),
    "more tokens than positions, which are computed": ("opt", {"input_ids": IDS}),
    "positions beyond the table": ("gpt2", {"input_ids": IDS[:, :5], "position_ids": torch.arange(14, 19)[None]}),
    "negative positions": ("gpt2", {"input_ids": IDS[:, :2], "position_ids": torch.tensor([[0, -1]])}),
    "token types beyond the table": ("bert", {"input_ids": IDS[:, :2], "token_type_ids": torch.tensor([[0, 2]])}),
    "negative token types": ("bert", {"input_ids": IDS[:, :2], "token_type_ids": torch.tensor([[0, -1]])}),
    "ids beyond the vocabulary": ("bert", {"input_ids": torch.tensor([[3, 40]])}),
    "negative ids": ("bert", {"input_ids": torch.tensor([[3, -1]])}),
}


@pytest.mark.parametrize("call", CALLS)
def test_forward_refuses(models, call):
    name, given = CALLS[call]
    eager, on_jax = models[name]
    with pytest.raises(IndexError), torch.no_grad():
        eager(**given)
    with pytest.raises(InvalidArgumentError, match="expected"):
        on_jax(**given)


def test_a_decode_step_refuses_what_the_prompt_had_room_for(models):
    on_jax = models["gpt2"][1]
    full = on_jax(IDS[:, :16], use_cache=True)[CACHE]
    with pytest.raises(InvalidArgumentError, match=r"wpe\.weight: expected indices from 0 to 15"):
        on_jax(IDS[:, :1], **{CACHE: full})
    some = on_jax(IDS[:, :4], use_cache=True)[CACHE]
    with pytest.raises(InvalidArgumentError, match="expected token ids from 0 to 39, got 40"):
        on_jax(torch.tensor([[40]]), **{CACHE: some})


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert"])
@pytest.mark.parametrize("num_padded", [1, 5])
def test_padded_rows_are_in_range(models, name, num_padded):
    eager, on_jax = models[name]
    ids, mask = IDS[:, :15].repeat(2, 1), torch.ones(2, 15, dtype=torch.long)
    for side in (slice(None, num_padded), slice(15 - num_padded, None)):
        padded = mask.clone()
        padded[0, side] = 0
        with torch.no_grad():
            expected = eager(input_ids=ids, attention_mask=padded)[0]
        got = on_jax(input_ids=ids, attention_mask=padded)[0]
        torch.testing.assert_close(got[padded.bool()], expected[padded.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bad", [40, -1])
def test_the_engine_refuses_ids_and_its_neighbours_go_on(models, bad):
    params = SamplingParams(max_new_tokens=2, temperature=0)
    with serve(copy.deepcopy(models["gpt2"][0]), engine=EngineOptions(max_num_seqs=2, max_model_len=16)) as served:
        neighbour = served.stream([5, 6], params)
        with pytest.raises(InvalidArgumentError, match=f"expected token ids from 0 to 39.*got {bad}"):
            served.generate_batch([[5, 6], [5, bad]], params)
        with pytest.raises(InvalidArgumentError, match=f"expected token ids from 0 to 39.*got {bad}"):
            served.iter_tokens([bad])
        list(neighbour)
        assert len(neighbour.token_ids) == 2
