"""Qwen4-Exp's indexer chooses the tokens that transformers' own chooses, also of fewer keys than a block has."""

import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer, Qwen4ExpTextRotaryEmbedding

from model_adapters.quirks.qwen4_exp import QUIRK
from parity_sweep.tiny.config import tiny_config


@pytest.mark.parametrize("num_keys", [1, 3, 4, 23])
@torch.no_grad()
def test_the_same_tokens_are_chosen(num_keys):
    config = tiny_config("qwen4_exp_text")
    config.indexer_compress_ratio, config.indexer_budget = 4, 8
    torch.manual_seed(0)
    indexer = Qwen4ExpTextQSAIndexer(config, 0).eval()
    hidden = torch.randn(2, num_keys, config.hidden_size)
    positions = torch.arange(num_keys).expand(3, 2, -1)
    rotary = Qwen4ExpTextRotaryEmbedding(config)(hidden, positions)
    mask = torch.ones(num_keys, num_keys, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    mask[1, ..., : num_keys // 3] = False  # padding
    ours = QUIRK.methods["Qwen4ExpTextQSAIndexer.forward"](indexer, hidden, rotary, mask, None)
    theirs = indexer(hidden, rotary, mask, None)
    rows = mask.any(-1)  # of tokens, not of padding
    assert torch.equal(ours.expand_as(theirs)[rows], theirs[rows])
    assert num_keys < 23 or not torch.equal(theirs, mask)  # some are left out
