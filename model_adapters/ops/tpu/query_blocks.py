"""Sizes of the blocks of queries that attention of ragged runs of tokens computes at a time."""

import math

from model_adapters.ops.tpu.page_buffers import LANES

NARROW = 16  # queries of an item that has at most as many: decode rows, ends of chunks
MAX_QUERIES = 128  # of a block of queries
MAX_SUMS_BYTES = 4 << 20  # of the sums of all heads
MAX_ROWS = 64  # of one product


def num_queries_of(num_tokens: int, query_heads: int, width: int) -> int:
    """Returns queries in a block: a power of two, sums of all heads within ``MAX_SUMS_BYTES``."""
    most = MAX_QUERIES
    while most > NARROW and (most >= 2 * num_tokens or most * query_heads * width * 4 > MAX_SUMS_BYTES):
        most //= 2
    return most


def heads_of_product(group: int, num_queries: int) -> int:
    """Returns how many query heads of a group make one product: a divisor of the group."""
    return max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * num_queries <= MAX_ROWS))


def heads_of_registers(group: int, width: int) -> int:
    """Returns how many heads of a group fill registers of 128 columns; 0 if they do not."""
    num_heads = LANES // math.gcd(width, LANES)
    return num_heads if group % num_heads == 0 else 0
