"""An audio type whose code selects by masks: all set for one input, but not for two of different lengths."""

import pytest

from torchax_serve.parity import tasks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.thorough
def test_audio_of_different_lengths_in_one_batch():
    result = tasks.TASKS["speech"].check("granite_speech")
    assert (result.status, result.padded_equal) == ("passed", True), result
