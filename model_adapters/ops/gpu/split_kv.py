"""How the keys of a row are shared out among programs, and the numbers that their running softmax is made of."""

from __future__ import annotations

LOG2_E = 1.4426950408889634  # the kernels take powers of two, which is what the hardware has
MASKED = -1e30  # below every real score; finite, so that the difference of two is no NaN
NOTHING = MASKED / 2  # where maxima begin: above what is masked, whose weight is therefore zero
NUM_PROGRAMS = 264  # two for each multiprocessor of an H200; other data-centre GPUs have as many within a factor of two
MAX_SPLITS = 64
MIN_SPLIT_LEN = 128


def round_up_to_power(value: int) -> int:
    """The smallest power of two that is no less than `value`."""
    return 1 << (value - 1).bit_length() if value > 1 else 1


def num_splits(num_programs: int, reach: int) -> int:
    """Into how many parts `reach` keys are cut so that `num_programs` programs of one part each become enough.

    From shapes alone: a row's keys are divided evenly when the kernel runs, however many they are.
    """
    wanted = min(-(-NUM_PROGRAMS // num_programs), -(-reach // MIN_SPLIT_LEN), MAX_SPLITS)
    return round_up_to_power(wanted)
