"""What a plan counts as read of caches with indexers: counted token by token, and by pools of real executors."""

import types

import numpy as np
import pytest

from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.planning.pool_reads import PoolReads, reads_of

FLOAT = np.dtype("f4")


def pool(width, window=None, **part):
    return PagedLayerSpec(1, width, FLOAT, window, **part)


@pytest.mark.parametrize("num_new", [1, 3, 50])
@pytest.mark.parametrize(
    "reads", [PoolReads(None), PoolReads(7), PoolReads(None, 9), PoolReads(7, 5), PoolReads(20, 9)]
)
def test_pairs_are_those_that_each_token_sees(reads, num_new):
    context, most = 50, min(reads.window or 50, reads.taken or 50)
    assert reads.pairs(num_new, context) == sum(min(at + 1, most) for at in range(context - num_new, context))


def test_an_indexer_reads_all_keys_and_attention_what_is_taken():
    """As DeepSeek-V3.2, whose second layer here takes the tokens of the first, and whose last has no indexer."""
    config = types.SimpleNamespace(index_topk=2048, index_n_heads=64, indexer_types=["full", "shared", "none"])
    shapes = [pool(576), pool(576), pool(576), pool(128, indexed_layer=0)]
    latents, shared, dense, keys = reads_of(config, shapes)
    assert [each.rows(100_000, 1) for each in (latents, shared, dense, keys)] == [2048, 2048, 100_000, 100_000]
    assert [each.rows(1_000, 1) for each in (latents, keys)] == [1_000, 1_000]
    assert latents.rows(100_000, 4) == 4 * 2048  # tokens of a verify step may take others each
    assert (latents.num_heads, keys.num_heads) == (None, 64)


def test_blocks_share_a_key():
    """As Qwen4-Exp."""
    config = types.SimpleNamespace(indexer_budget=64, indexer_n_heads=8, indexer_compress_ratio=4)
    pages, keys = reads_of(config, [pool(64), pool(32, indexed_layer=0)])
    assert (pages.rows(1_000, 1), keys.rows(1_000, 1)) == (64, 250)


def test_entries_are_read_of_blocks():
    """As DeepSeek-V4: a layer whose indexer takes entries, and one that reads all."""
    config = types.SimpleNamespace(index_topk=512, index_n_heads=64)
    rates = {0: 4, 1: 128}
    shapes = [pool(512, 128), pool(512, 128)]
    for layer, names in ((0, ("compressor", "indexer")), (1, ("compressor",))):
        for name in names:
            shapes.append(pool(2048, 2 * rates[layer], indexed_layer=layer, part=f"{name} tokens"))
            entries = {"part": f"{name} entries", "row_len": rates[layer]}
            shapes.append(pool(512, indexed_layer=layer, **entries))
    found = reads_of(config, shapes)
    assert [each.rows(min(40_960, each.window or 40_960), 1) for each in found] == [
        *(128, 128),  # the last tokens
        *(2, 512),  # of what an entry is made of, and the entries that are taken
        *(2, 10_240),  # an indexer's entries, one for four tokens
        *(2, 320),
    ]
    assert [each.num_heads for each in found] == [None, None, 0, None, 0, 64, 0, None]
