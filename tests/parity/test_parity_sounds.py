"""A type with sounds whose code selects by masks, which are all set for one sound and not for two of other lengths."""

import pytest

from torchax_serve.parity import tasks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def test_sounds_of_many_lengths_in_one_batch():
    result = tasks.TASKS["speech"].check("granite_speech")
    assert (result.status, result.padded_equal) == ("passed", True), result
