"""A model of one's own that attends with ALiBi through transformers' interface: packed, and token-exact."""

import copy

import pytest
import torch
import transformers
from cache_name import CACHE
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention
from weights import draw_matrices

from torchax_serve import EngineOptions, serve

VOCAB_SIZE = 97
NEW = 10
SLOPES = [0.7, 0.4, 0.1, 0.02]  # of four heads; strong enough to change tokens


def attend_eagerly(module, query, key, value, mask, *, scaling, alibi_slopes, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    distance = torch.arange(key.shape[2]) - torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None]
    scores = query @ key.transpose(2, 3) * scaling + alibi_slopes[None, :, None, None] * distance + mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class AlibiAttention(LlamaAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.register_buffer("slopes", torch.tensor(SLOPES))

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(hidden_states).view(heads).transpose(1, 2) for project in projections)  # no rotation
        if (cache := kwargs.get(CACHE)) is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend_eagerly)
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling, alibi_slopes=self.slopes)
        return self.o_proj(out.reshape(*hidden_states.shape[:2], -1)), None


@pytest.fixture(scope="module")
def eager():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = AlibiAttention(config, index)
    draw_matrices(model, std=0.3)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB_SIZE, (1, length), generator=generator) for length in (3, 40, 17, 1, 33)]


def answers(model):
    given = {"max_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        return [
            model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, ids.shape[1] :].tolist()
            for ids in prompts()
        ]


def test_requests_are_packed_and_have_the_tokens_of_eager_code(eager):
    expected = answers(eager)
    options = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_batched_tokens=32)
    with serve(copy.deepcopy(eager), engine=options) as model:
        config = transformers.GenerationConfig(max_new_tokens=NEW)
        streams = [model.iter_tokens(ids[0].tolist(), config) for ids in prompts()]
        assert [list(stream) for stream in streams] == expected
        assert "per-sequence" not in model.engine.description
        assert answers(model) == expected
    flat = copy.deepcopy(eager)
    for layer in flat.model.layers:
        layer.self_attn.slopes.zero_()
    assert answers(flat) != expected


def test_a_batch_padded_on_the_left(eager):
    ids, mask = torch.zeros(2, 17, dtype=torch.long), torch.zeros(2, 17, dtype=torch.long)
    for row, prompt in enumerate((prompts()[0], prompts()[2])):
        ids[row, 17 - prompt.shape[1] :], mask[row, 17 - prompt.shape[1] :] = prompt[0], 1
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    with serve(copy.deepcopy(eager)) as model:
        assert torch.equal(model.generate(**given), eager.generate(**given))
