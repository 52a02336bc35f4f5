"""Split KV: how keys are divided among programs; constants of the running softmax."""

from __future__ import annotations

LOG2_E = 1.4426950408889634  # the kernels use powers of two, which the hardware computes
MASKED = -1e30  # below every real score; finite, so that the difference of two is no NaN
NOTHING = MASKED / 2  # initial maximum: above masked scores, whose weight is therefore zero
NUM_PROGRAMS = (
    264  # two for each of the 132 multiprocessors of an H200; other data-centre GPUs differ by a factor of up to two
)
MAX_SPLITS = 64  # splits of a row
MIN_SPLIT_LEN = 128  # keys of a split


def round_up_to_power(value: int) -> int:
    """Returns the smallest power of two that is at least `value`."""
    return 1 << (value - 1).bit_length() if value > 1 else 1


def num_splits(num_programs: int, reach: int) -> int:
    """Returns the number of splits of `reach` keys that fill the GPU with programs.

    It depends only on shapes: the kernel divides a row's actual keys evenly when it runs.
    """
    wanted = min(-(-NUM_PROGRAMS // num_programs), -(-reach // MIN_SPLIT_LEN), MAX_SPLITS)
    return round_up_to_power(wanted)
