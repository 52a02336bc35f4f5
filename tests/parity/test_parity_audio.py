"""An audio type whose code selects by masks: all set for one input, but not for two of different lengths."""

import pytest

from parity_sweep import checks
from torchax_serve.parity.tasks import shipped

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.thorough
def test_audio_of_different_lengths_in_one_batch():
    result = checks.check("speech", "granite_speech")
    assert (result.status, result.executor) == ("passed", "packed"), result
    assert result.padded_equal and result.engine_equal, result


def test_types_run_on_the_engine_or_say_why_not():
    _, results = shipped("speech")
    passed = [result for result in results.values() if result.status == "passed"]
    assert len(passed) >= 18
    for result in passed:
        on_engine = result.executor in ("packed", "per-sequence")
        assert result.engine_equal if on_engine else result.fallback_reason, result
