"""Tiny models by type of rotary embeddings, prompts on both sides of the border, and eager transformers' answers."""

import copy
import functools

import torch
import transformers
from tiny_models import VOCAB_SIZE
from weights import draw_matrices

from parity_sweep.tiny.rope_types import BORDER, with_rope

FAMILIES = {
    "llama": {},
    "phi3": {},
    "phimoe": {"num_local_experts": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "diffllama": {},
}
COMPUTED_ANEW = {("phi3", "longrope")}
"""Models that compute all tokens anew when they grow past the border; some releases do not get that right."""
LENS = (5, BORDER - 3, BORDER + 16)
"""Of prompts: one that stays below the border, one whose answer crosses it, one behind it."""
NUM_NEW = 8


def prompt(length, seed=0):
    """Token ids int64[1, length]."""
    return torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(length + 100 * seed))


@functools.cache
def _shared(family, kind):
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = transformers.AutoConfig.for_model(family, **{**common, **FAMILIES[family]})
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        with_rope(config, kind), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    draw_matrices(made, std=0.25)
    return made


def rope_model(family, kind):
    """A model of its own: eager code keeps the frequencies of its last call."""
    return copy.deepcopy(_shared(family, kind))


def answers(family, kind, ids, mask=None, num_new=NUM_NEW):
    """New token ids int64[batch, num_new] of greedy decoding by eager transformers, of a model that was never called.

    Where all tokens are computed anew at the border, a model without a cache gives the same, in all releases.
    """
    given = {} if (family, kind) not in COMPUTED_ANEW else {"use_cache": False}
    output = rope_model(family, kind).generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=num_new,
        do_sample=False,
        **given,
    )
    return output[:, ids.shape[1] :]


def left_padded(prompts):
    """Token ids and mask int64[batch, longest]."""
    longest = max(ids.shape[1] for ids in prompts)
    rows = [torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in prompts]
    mask = [torch.nn.functional.pad(torch.ones_like(ids), (longest - ids.shape[1], 0)) for ids in prompts]
    return torch.cat(rows), torch.cat(mask)
