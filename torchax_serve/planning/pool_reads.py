"""What attention reads of the pools of a cache: all tokens, or those that it needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from model_adapters.caches.packed_batch import INDEX_KEYS
from torchax_serve.kv_cache.pools import PagedLayerSpec


@dataclasses.dataclass(frozen=True)
class PoolReads:
    """What the queries of a step read of one pool.

    Attributes:
        window: Last tokens that a query sees; None: all.
        taken: Most rows that a query reads; None: all of the tokens that it sees.
        row_len: Tokens that a row is of.
        num_heads: Heads of the queries that it is multiplied with; 0: nothing is multiplied.
    """

    window: int | None
    taken: int | None = None
    row_len: int = 1
    num_heads: int | None = None

    def rows(self, num_tokens: float, num_queries: int) -> float:
        """Returns the rows that queries of a request read, which see `num_tokens` together."""
        rows = num_tokens / self.row_len
        return rows if self.taken is None else min(rows, float(num_queries * self.taken))

    def pairs(self, num_new: int, context: int) -> float:
        """Returns the pairs of a new token and a row that it is multiplied with.

        The new tokens are the last `num_new` of `context`; each sees itself, too.
        """
        most = min(self.window or math.inf, math.inf if self.taken is None else self.taken * self.row_len)
        before = context - num_new
        num_growing = num_new if most == math.inf else int(min(num_new, max(0, most - before)))
        growing = num_growing * before + num_growing * (num_growing + 1) / 2  # of tokens that see all before them
        others = (num_new - num_growing) * most if num_growing < num_new else 0
        return (growing + others) / self.row_len


def reads_of(config: Any, shapes: Sequence[PagedLayerSpec]) -> list[PoolReads]:
    """Returns what is read of each pool of a model.

    Args:
        config: Of the model's text.
        shapes: Pools of its layers, and behind them what layers keep besides keys and values.
    """
    parts = {(shape.indexed_layer, shape.part) for shape in shapes if shape.indexed_layer is not None}
    shared = {place for place, kind in enumerate(getattr(config, "indexer_types", None) or ()) if kind == "shared"}
    found = []
    for place, shape in enumerate(shapes):
        if shape.indexed_layer is not None:
            found.append(_of_part(config, shape, has_indexer=(shape.indexed_layer, "indexer entries") in parts))
            continue
        is_sparse = (place, INDEX_KEYS) in parts or place in shared
        found.append(PoolReads(shape.window, _num_taken(config) if is_sparse else None))
    return found


def _of_part(config: Any, shape: PagedLayerSpec, *, has_indexer: bool) -> PoolReads:
    """Returns what is read of what a layer keeps besides keys and values.

    Tokens that entries are made of are read once for each entry that they are part of, of which there are two at most.
    """
    index_heads = getattr(config, "index_n_heads", None) or getattr(config, "indexer_n_heads", None)
    if shape.part == INDEX_KEYS:
        return PoolReads(shape.window, None, getattr(config, "indexer_compress_ratio", None) or 1, index_heads)
    if shape.part == "indexer entries":
        return PoolReads(None, None, shape.row_len, index_heads)
    if shape.part == "compressor entries":
        return PoolReads(None, _num_taken(config) if has_indexer else None, shape.row_len)
    return PoolReads(shape.window, 2, num_heads=0)


def _num_taken(config: Any) -> int | None:
    """Returns how many tokens or entries an indexer takes for a query."""
    found: int | None = getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None)
    return found
